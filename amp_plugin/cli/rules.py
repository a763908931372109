"""Define the commands for op rules: `rules show`, `rules diff` and `tune`."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.table import Table

from amp_plugin.cli.arguments import Arguments, AsJson, AsModule, Device, Script, fail, program_of, show

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules
    from amp_plugin.tuning.rehearsal import Rehearsal
    from amp_plugin.tuning.tune import Tuning


commands = typer.Typer(
    name="rules", help="Show op rules, or where two sets of them differ.", no_args_is_help=True
)

_WHAT = "default, a policy such as torch-2.11, or a rules file."


@commands.command(name="show")
def show_rules(
    what: Annotated[str, typer.Argument(help=_WHAT)] = "default",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List each op with its rule."""
    (rules,) = _rule_sets([what], device)
    listed = {op: rules.described(op) for op in sorted({*rules.rules, *rules.keep})}
    if as_json:
        print(json.dumps({"device_type": rules.device_type, "rules": listed}, indent=2))
        return
    table = _table(f"{len(listed)} rules on {rules.device_type}: {what}", "op", "rule")
    for op, rule in sorted(listed.items(), key=lambda row: (row[1], row[0])):
        table.add_row(op, rule)
    show(table)


@commands.command(name="diff")
def diff_rules(
    first: Annotated[str, typer.Argument(help=_WHAT)],
    second: Annotated[str, typer.Argument(help=_WHAT)] = "default",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List the ops that two sets of op rules treat differently. The exit code is 1 if there are any."""
    chosen, other = _rule_sets([first, second], device)
    differing = chosen.diff(other)
    if as_json:
        print(json.dumps({"device_type": chosen.device_type, "ops": differing}, indent=2))
    elif differing:
        title = f"{len(differing)} ops treated differently on {chosen.device_type}"
        table = _table(title, "op", first, second)
        for op, pair in differing.items():
            table.add_row(op, *pair)
        show(table)
    else:
        print(f"no op is treated differently on {chosen.device_type}")
    raise typer.Exit(1 if differing else 0)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, box=None, pad_edge=False, title_justify="left")


def _rule_sets(words: list[str], device: str | None) -> list[OpRules]:
    """Return the op rules for each of ``words``, which are policy names and paths of rules files.

    All op rules are for one device type. If ``device`` is None, the device type comes from the rules files.
    If no rules file is given either, the device type is that of this machine's accelerator.
    """
    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - loads torch
    from amp_plugin.hardware import default_device  # noqa: PLC0415 - loads torch

    try:
        files = {word: OpRules.from_yaml(word) for word in words if word.endswith((".yaml", ".yml"))}
        devices = {rules.device_type for rules in files.values()} | ({device} if device else set())
        if len(devices) > 1:
            fail(
                f"these rules are for different devices, {' and '.join(sorted(devices))}; give rules for "
                "one device",
                code=2,
            )
        of = devices.pop() if devices else default_device()
        default = {"default": OpRules.default(of)}
        return [files.get(word) or default.get(word) or OpRules.named(word, of) for word in words]
    except (OSError, ValueError) as error:
        fail(f"{error}; give {_WHAT}", code=2)


def _share(given: str) -> float:
    """Convert a percentage or fraction to a number. ``5%`` and ``0.05`` both give 0.05."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", str(given).strip())
    if number is None:
        msg = f"{given!r} is not a percentage or a fraction; give 5% or 0.05"
        raise typer.BadParameter(msg)
    return float(number[1]) / (100 if number[2] else 1)


Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="The file to write: rules.yaml, or formats.yaml with --formats."),
]
Goal = Annotated[Literal["memory", "casts", "accuracy"], typer.Option("--for", help="What to improve.")]
Reference = Annotated[Literal["fp64", "fp32"], typer.Option(help="The dtype of the reference gradients.")]
Budget = Annotated[
    float,
    typer.Option(
        parser=_share,
        metavar="SHARE",
        help="How much the gradient error may grow (with --for accuracy: the bytes), such as 5% or 0.05.",
    ),
]


def tune(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    output: Output = None,
    goal: Goal = "memory",
    budget: Budget = 0.05,
    batches: Annotated[
        int, typer.Option(min=1, help="The number of backward passes to run and measure.")
    ] = 4,
    device: Device = None,
    reference: Reference = "fp64",
    formats: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Choose a format for each Linear layer instead, from a list: nvfp4,mxfp8,fp8,bf16. The "
            "budget is then the gradient error.",
        ),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw a plot of all sets of rules that were tried into this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find op rules that reduce memory use, need fewer casts or avoid an overflow. Write them to a file.

    The script runs about fifty times in a copy of the current folder. Each run of the script stops after
    the number of backward passes that --batches sets. The script's output is dropped. Autocast blocks in the
    script must not set op rules themselves.

    With --formats, the command emulates each Linear layer in each format below 16 bits, such as fp8, on any
    machine. The command then prints the errors of each layer, and writes the chosen formats to files for
    amp_plugin, torchao and TransformerEngine.
    """
    output = output or Path("formats.yaml" if formats else "rules.yaml")
    if formats and (goal != "memory" or plot is not None):
        fail("--formats chooses formats and not rules; leave --for and --plot out", code=2)
    for file in filter(None, (output, plot)):
        require_target(file, force=force)
    from amp_plugin.hardware import default_device  # noqa: PLC0415 - loads torch
    from amp_plugin.tuning import rehearsal, tune, workload  # noqa: PLC0415 - loads torch

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps torch's profiler quiet
    program = program_of(script, as_module=as_module, core_for="tune")
    try:
        if plot is not None:
            tune.require_plots(plot)
        with closing(workload.Script(program, arguments or [], batches=batches)) as tuned:
            if formats:
                names = [name.strip() for name in formats.split(",")]
                found = rehearsal.rehearsed(
                    tuned, device or default_device(), formats=names, budget=budget, progress=not as_json
                )
                _print_placement(found, found.save(output), as_json=as_json)
                return
            tuning = tune.tuned(
                tuned,
                device or default_device(),
                goal=goal,
                budget=budget,
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
        return
    print(tuning.headline)
    show(tuning.table())
    if tuning.jump:
        print("with the default rules, " + "\n".join(tuning.jump))
    print(f"wrote {output}, which {'changes no rule' if tuning.keeps_default else 'contains the rules'}")


def _print_placement(found: Rehearsal, files: list[Path], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"files": [str(file) for file in files], **found.to_dict()}))
        return
    show(found.table())
    print(found.limits)
    print(f"wrote {files[0]} for formats=, {files[1]} for torchao, and {files[2]} for TransformerEngine")


def require_target(file: Path, *, force: bool) -> None:
    """End the command with an error if its result could not be written to ``file``."""
    if not file.parent.is_dir():
        fail(
            f"there is no folder {str(file.parent)!r} for {file.name}; make it, or give another name", code=2
        )
    if file.exists() and not force:
        fail(f"{str(file)!r} exists; give another name, or --force to write over it", code=2)


_NUMBERS: Final = ("saved_bytes", "cast_bytes", "error", "mean_error", "failed")


def _as_json(tuning: Tuning, output: Path) -> Any:
    from amp_plugin.numerics.values import as_json  # noqa: PLC0415 - loads torch

    sides = {"before": tuning.before, "after": tuning.after}
    values = {
        "nearest": tuning.nearest,
        "jump": list(tuning.jump),
        "goal": tuning.goal,
        "file": str(output),
        "rules": {change.op: change.rule.value for change in tuning.changes},
        "tried": len(tuning.tried),
        **{
            name: {number: getattr(side, number) for number in _NUMBERS} | {"seconds": seconds}
            for (name, side), seconds in zip(sides.items(), tuning.seconds, strict=True)
        },
    }
    return as_json(values)
