"""Run a program under ``diagnose``, as a shadow run, or recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from amp_plugin.numerics.diagnosis import Diagnosis
from amp_plugin.numerics.finding import Finding, NonFiniteError
from amp_plugin.numerics.recorder import RunRecorder
from amp_plugin.numerics.shadow_run import ShadowRun
from amp_plugin.program import Program
from amp_plugin.program_run import ProgramRun, run_program


def diagnosed(
    program: Program,
    arguments: Sequence[str],
    *,
    keep_going: bool,
    strict: bool,
    on_finding: Callable[[Finding], None],
) -> tuple[Diagnosis, ProgramRun]:
    """Run a program and watch its ops.

    Args:
        program: a file or a module.
        arguments: its arguments.
        keep_going: as for ``diagnose``.
        strict: as for ``diagnose``.
        on_finding: called with each finding as soon as it is found.

    Returns:
        The closed diagnosis, and how the program ended: at the first finding, unless ``keep_going``.
    """
    diagnosis = Diagnosis(keep_going=keep_going, strict=strict, on_finding=on_finding)
    run = run_program(program, arguments, around=diagnosis, expected=NonFiniteError)
    return diagnosis, run


def compared(program: Program, arguments: Sequence[str], *, dtype: str) -> tuple[ShadowRun, ProgramRun]:
    """Run a program beside itself in a wide dtype.

    Args:
        program: a file or a module.
        arguments: its arguments.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        The closed shadow run, and how the program ended.
    """
    errors = ShadowRun(dtype=getattr(torch, dtype))
    return errors, run_program(program, arguments, around=errors)


def recorded(
    program: Program, arguments: Sequence[str], *, path: Path, steps: int
) -> tuple[RunRecorder, ProgramRun]:
    """Run a program and record what its ops make.

    Args:
        program: a file or a module.
        arguments: its arguments.
        path: of the file to write.
        steps: optimizer steps to record.

    Returns:
        The closed recorder, and how the program ended.
    """
    recorder = RunRecorder(path, steps=steps)
    return recorder, run_program(program, arguments, around=recorder)
