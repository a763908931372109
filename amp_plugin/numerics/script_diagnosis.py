"""Run a script under ``diagnose``, as a shadow run, or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from amp_plugin.numerics.diagnosis import Diagnosis
from amp_plugin.numerics.finding import NonFiniteError
from amp_plugin.numerics.recorder import RunRecorder
from amp_plugin.numerics.shadow_run import ShadowRun
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


def compared(script: Path, arguments: Sequence[str], *, dtype: str) -> tuple[ShadowRun, ScriptRun]:
    """Run ``script`` as the main program beside itself in a wide dtype.

    Args:
        script: a Python file.
        arguments: its arguments.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        The closed shadow run, and how the script ended.
    """
    errors = ShadowRun(dtype=getattr(torch, dtype))
    return errors, run_script(script, arguments, around=errors)


def recorded(
    script: Path, arguments: Sequence[str], *, path: Path, steps: int
) -> tuple[RunRecorder, ScriptRun]:
    """Run ``script`` as the main program and record what its ops make.

    Args:
        script: a Python file.
        arguments: its arguments.
        path: of the file to write.
        steps: optimizer steps to record.

    Returns:
        The closed recorder, and how the script ended.
    """
    recorder = RunRecorder(path, steps=steps)
    return recorder, run_script(script, arguments, around=recorder)
