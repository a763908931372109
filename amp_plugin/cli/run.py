"""Define the commands `run`, `report` and `casts`, which run a program without editing it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from amp_plugin.cli.arguments import Arguments, AsJson, AsModule, Script, fail, program_of, run_script, show
from amp_plugin.program import run_program
from amp_plugin.run_page.libraries import require_libraries

Rules = Annotated[
    Path | None,
    typer.Option("--rules", exists=True, dir_okay=False, help="Op rules that autocast follows, a YAML file."),
]
Precision = Annotated[
    Literal["fp16", "bf16", "auto"] | None,
    typer.Option(
        help="The precision wherever the program chooses none: the dtype of autocast blocks, mixed_precision "
        "of an Accelerator, precision of a Trainer or Fabric. auto chooses what this machine computes "
        "fast."
    ),
]


def run(
    script: Script,
    arguments: Arguments = None,
    precision: Precision = None,
    rules: Rules = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", help="Write a run report to this HTML file, as `amp-plugin report` does."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Record each optimizer step in this file, as one line of JSON."),
    ] = None,
    on_spike: Annotated[
        str | None,
        typer.Option(
            "--on-spike",
            help="What to do about a step whose gradient norm is far above the mean: skip, clip, raise, or a "
            "mapping such as '{of: loss, sigma: 8}'.",
        ),
    ] = None,
    as_module: AsModule = False,
) -> None:
    """Run a program with amp_plugin, without editing the program. The exit code is the program's.

    Until the process ends, torch.autocast, torch.amp.GradScaler, Accelerate's Accelerator and Lightning's
    Trainer and Fabric use amp_plugin. Processes that the program starts use amp_plugin too. The program need
    not import amp_plugin. To train with several processes, use: torchrun -m amp_plugin run train.py
    """
    from amp_plugin.adapters.takeover import Takeover  # noqa: PLC0415 - for this command only

    program = program_of(script, as_module=as_module)
    if page is not None:
        try:
            require_libraries()
        except ImportError as error:
            fail(str(error), code=1)
    options = {"log": None if log is None else str(log.absolute()), "on_spike": on_spike}
    given = {name: value for name, value in options.items() if value is not None}
    name = Path(program.name).name
    takeover = Takeover(name, precision=precision, rules=rules, page=page, options=given)
    takeover.begin()
    errors: list[BaseException] = []
    code, failed = run_program(program, arguments or [], _noted(errors))
    if failed:
        takeover.program_failed(next(iter(errors), None))
    raise typer.Exit(code)


@contextmanager
def _noted(errors: list[BaseException]) -> Iterator[None]:
    """If the block raises an error, append the error to ``errors`` and raise it again."""
    try:
        yield
    except BaseException as error:
        errors.append(error)
        raise


def report(
    script: Script,
    page: Annotated[Path, typer.Option("--page", help="The HTML file to write.")] = Path("run.html"),
    arguments: Arguments = None,
    precision: Precision = None,
    rules: Rules = None,
    as_module: AsModule = False,
) -> None:
    """Run a script and write a run report, an HTML file that is kept up to date.

    The report shows the loss scale, skipped steps, gradient norms, and how near gradients come to overflow.
    For skipped steps, the report names the module in which the inf or nan arose. The script runs as with
    `amp-plugin run`, so it need not import amp_plugin. The exit code is the script's.
    """
    run(script, arguments, precision, rules, page, as_module=as_module)


_FIELDS: Final = {  # the fields that identify a row in JSON
    "cast": ("module", "op", "argument", "kind", "before", "after"),
    "module": ("module",),
    "op": ("op",),
}


def casts(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    by: Annotated[
        Literal["cast", "module", "op"], typer.Option(help="What one row of the table stands for.")
    ] = "cast",
    every: Annotated[
        bool,
        typer.Option(
            "--every",
            help="Give each module its own row. By default, modules that differ by a number share a row.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a script and list the casts that autocast makes. The exit code is the script's."""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - loads torch

    from amp_plugin.casting.cast_log import cast_table, grouped, log_casts  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.formats import log_formats  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.values import as_json as as_values  # noqa: PLC0415 - loads torch

    program = program_of(script, as_module=as_module, core_for="casts")
    log = log_casts()
    counters["stats"]["unique_graphs"] = 0
    with log_formats() as formats:
        code, failed = run_script(program, arguments, log, as_json=as_json)
    graphs = int(counters["stats"]["unique_graphs"])
    made = log.records()
    if not every:
        made = [replace(cast, module=re.sub(r"\b\d+\b", "*", cast.module)) for cast in made]
    if as_json:
        groups = grouped(made, lambda cast: tuple((name, getattr(cast, name)) for name in _FIELDS[by]))
        rows = as_values([dict(key) | asdict(totals) for key, totals in groups.items()])
        below = formats.to_dict()
        answer = {"script": script, "by": by, "compiled_graphs": graphs, "rows": rows, "formats": below}
        print(json.dumps(answer))
    elif made or graphs:
        show(cast_table(made, by))
        if graphs:
            print(f"the casts inside the {graphs} compiled graphs are not in this table")
    elif not failed:
        print(f"autocast made no cast in {script}: open torch.autocast(device) around its forward pass")
    if formats.ranges() and not as_json:
        show(formats.table())
    raise typer.Exit(code)
