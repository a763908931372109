"""The command `amp-plugin tune`: search op rules for a program and write them to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from amp_plugin.cli.arguments import (
    Arguments,
    AsJson,
    AsModule,
    Script,
    fail,
    program_of,
    show,
    word_option,
)

if TYPE_CHECKING:
    from amp_plugin.program import Program
    from amp_plugin.tuning.tune import Tuning

_GOAL_NAMES: Final = {"speed": "casts", "bytes": "memory", "fp16": "accuracy"}
_DTYPE_NAMES: Final = {"float64": "fp64", "double": "fp64", "float32": "fp32"}

Output = Annotated[Path, typer.Option("-o", "--output", help="The rules file to write.")]
Goal = Annotated[
    str,
    word_option(("memory", "casts", "accuracy"), "What is to improve.", name="--for", aliases=_GOAL_NAMES),
]
Reference = Annotated[
    str, word_option(("fp64", "fp32"), "What gradients are compared to.", aliases=_DTYPE_NAMES)
]


def _share(given: str) -> float:
    """Return 0.05 for ``5%`` and for ``0.05``."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", str(given).strip())
    if number is None:
        msg = f"{given!r} is no share; give it as 5% or 0.05"
        raise typer.BadParameter(msg)
    return float(number[1]) / (100 if number[2] else 1)


def tune(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    output: Output = Path("rules.yaml"),
    goal: Goal = "memory",
    budget: Annotated[
        str, typer.Option(help="How much more gradient error is allowed; with --for accuracy: bytes.")
    ] = "5%",
    batches: Annotated[int, typer.Option(min=1, help="Backward passes to measure.")] = 4,
    device: Annotated[str | None, typer.Option(help="Device of the rules; default: the best here.")] = None,
    reference: Reference = "fp64",
    plot: Annotated[Path | None, typer.Option(help="Draw the sets tried into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search op rules that save memory or casts, or cure an overflow, and write them to a file.

    The script runs some fifty times up to its first backward passes; it has to open autocast without rules of
    its own. What it prints is dropped.
    """
    share = _share(budget)
    program = program_of(script, as_module=as_module, command="tune")
    try:
        tuning = _tuned(
            program,
            arguments or [],
            batches,
            device,
            goal=goal,
            budget=share,
            reference=reference,
            progress=not as_json,
        )
        tuning.save(output)
        if plot is not None:
            tuning.plot(plot)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fail(str(error), code=1)
    if as_json:
        print(json.dumps(_as_json(tuning, output)))
    else:
        _tell(tuning, output, plot)


def _tuned(program: Program, arguments: list[str], batches: int, device: str | None, **search: Any) -> Tuning:
    from amp_plugin.cli.doctor import default_device  # noqa: PLC0415 - loads torch
    from amp_plugin.kernels.build import require_native  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning.tune import tune_script  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning.workload import Script  # noqa: PLC0415 - loads torch

    require_native("amp-plugin tune")
    script = Script(program, arguments, batches=batches)
    return tune_script(script, device_type=device or default_device(), **search)


def _tell(tuning: Tuning, output: Path, plot: Path | None) -> None:
    drawn = f"; {plot} shows the {len(tuning.tried)} sets tried" if plot else ""
    print(tuning.headline)
    show(tuning.table())
    print(f"{output} holds the rules{drawn}")


def _rules(changes: Any) -> dict[str, str]:
    return {change.op: change.rule.value for change in changes}


def _as_json(tuning: Tuning, output: Path) -> dict[str, Any]:
    rules = _rules(entry.changes[0] for entry in tuning.changes)
    sides = {
        name: {
            "saved_bytes": side.saved_bytes,
            "cast_bytes": side.cast_bytes,
            "error": side.error,
            "mean_error": side.mean_error,
            "failed": side.failed,
            "seconds": seconds,
        }
        for name, side, seconds in zip(
            ("before", "after"), (tuning.before, tuning.after), tuning.seconds, strict=True
        )
    }
    miss = tuning.nearest
    nearest = miss and {"rules": _rules(miss.attempt.changes), "saved": miss.saved, "over_budget": miss.over}
    return {
        "nearest": nearest,
        "goal": tuning.goal,
        "file": str(output),
        "rules": rules,
        "tried": len(tuning.tried),
        **sides,
    }
