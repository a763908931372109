"""Run a script under ``diagnose``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amp_plugin.numerics.diagnosis import Diagnosis
from amp_plugin.numerics.finding import NonFiniteError
from amp_plugin.script_run import ScriptRun, run_script


def diagnosed(
    script: Path, arguments: Sequence[str], *, keep_going: bool, strict: bool
) -> tuple[Diagnosis, ScriptRun]:
    """Run ``script`` as the main program and watch its ops.

    Args:
        script: a Python file.
        arguments: its arguments.
        keep_going: as for ``diagnose``.
        strict: as for ``diagnose``.

    Returns:
        The closed diagnosis, and how the script ended: at the first finding, unless ``keep_going``.
    """
    diagnosis = Diagnosis(keep_going=keep_going, strict=strict)
    run = run_script(script, arguments, around=diagnosis, expected=NonFiniteError)
    return diagnosis, run
