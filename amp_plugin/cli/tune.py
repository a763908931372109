"""The command `amp-plugin tune`: search op rules for a program and write them to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from amp_plugin.cli.arguments import (
    Arguments,
    AsJson,
    AsModule,
    Device,
    Script,
    fail,
    need_core,
    program_of,
    show,
)

if TYPE_CHECKING:
    from amp_plugin.tuning.tune import Tuning


def _share(given: str) -> float:
    """Return 0.05 for ``5%`` and for ``0.05``."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", str(given).strip())
    if number is None:
        msg = f"{given!r} is not a share; give it as 5% or 0.05"
        raise typer.BadParameter(msg)
    return float(number[1]) / (100 if number[2] else 1)


Output = Annotated[Path, typer.Option("-o", "--output", help="The rules file to write.")]
Goal = Annotated[Literal["memory", "casts", "accuracy"], typer.Option("--for", help="What to improve.")]
Reference = Annotated[Literal["fp64", "fp32"], typer.Option(help="What to compare gradients with.")]
Budget = Annotated[
    float,
    typer.Option(
        parser=_share,
        metavar="SHARE",
        help="Share by which the gradient error may grow, 5% or 0.05; with --for accuracy the bytes.",
    ),
]


def tune(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    output: Output = Path("rules.yaml"),
    goal: Goal = "memory",
    budget: Budget = 0.05,
    batches: Annotated[int, typer.Option(min=1, help="Backward passes to run and measure.")] = 4,
    device: Device = None,
    reference: Reference = "fp64",
    as_json: AsJson = False,
) -> None:
    """Search op rules that save memory or casts, or cure an overflow, and write them to a file.

    The script runs some fifty times, up to its first backward passes, in copies of this folder.
    Its autocast blocks must name no rules of their own. What it prints is dropped.
    """
    from amp_plugin.cli.doctor import default_device  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning import tune, workload  # noqa: PLC0415 - loads torch

    program = program_of(script, as_module=as_module)
    need_core("tune")
    try:
        tuning = tune.tuned(
            workload.Script(program, arguments or [], batches=batches),
            device or default_device(),
            goal=goal,
            budget=budget,
            reference=reference,
            progress=not as_json,
        )
        tuning.save(output)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fail(str(error), code=1)
    if as_json:
        print(json.dumps(_as_json(tuning, output)))
        return
    print(tuning.headline)
    show(tuning.table())
    print(f"{output} {'changes no rule' if tuning.keeps_default else 'holds the rules'}")


_NUMBERS: Final = ("saved_bytes", "cast_bytes", "error", "mean_error", "failed")


def _as_json(tuning: Tuning, output: Path) -> dict[str, Any]:
    sides = {"before": tuning.before, "after": tuning.after}
    return {
        "nearest": tuning.nearest,
        "goal": tuning.goal,
        "file": str(output),
        "rules": {change.op: change.rule.value for change in tuning.changes},
        "tried": len(tuning.tried),
        **{
            name: {number: getattr(side, number) for number in _NUMBERS} | {"seconds": seconds}
            for (name, side), seconds in zip(sides.items(), tuning.seconds, strict=True)
        },
    }
