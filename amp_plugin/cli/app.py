"""The command `amp-plugin`: check a machine, compile ahead, list a script's casts.

Exit codes: 0 all is well, 1 something is missing or failed, 2 the command line or an environment
variable is wrong. With ``--json`` standard output is one JSON object and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.markup import escape

import amp_plugin
from amp_plugin.cli import numerics, rules, run, tune
from amp_plugin.cli.arguments import (
    OF_SCRIPTS,
    Arguments,
    AsJson,
    AsModule,
    Script,
    fail,
    output_of_script,
    program_of,
    show,
    word_option,
)

app = typer.Typer(
    name="amp-plugin",
    help="Automatic mixed precision for PyTorch, Lightning and Accelerate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Device = Annotated[
    str | None,
    word_option(
        ("cpu", "cuda", "xpu", "mps"),
        "Device to plan for; default: the best here.",
        aliases={"gpu": "cuda"},
    ),
]
_NO_CASTS = "no casts: was the code in an autocast block, amp_plugin's or torch's, and not compiled?"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(amp_plugin.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Automatic mixed precision for PyTorch, Lightning and Accelerate."""


@app.command()
def doctor(
    precision: Annotated[str, word_option(("fp16", "bf16", "fp32"), "Precision to plan for.")] = "fp16",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show versions, devices, what is compiled or why not, the cache, and the plan for a precision."""
    from amp_plugin.cli.doctor import default_device, examine  # noqa: PLC0415 - loads torch

    try:
        report = examine(precision, device or default_device())
    except ValueError as error:
        fail(str(error), code=2)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    raise typer.Exit(0 if report["healthy"] else 1)


def _check_architectures(given: list[str] | None) -> list[str] | None:
    for name in given or []:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            msg = (
                f"{name!r} is no GPU architecture; give it as sm_90, `amp-plugin doctor` shows this machine's"
            )
            raise typer.BadParameter(msg)
    return given


@app.command()
def build(
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compile even what the cache has.")] = False,
    cuda: Annotated[
        list[str] | None,
        typer.Option(
            "--cuda",
            metavar="ARCH",
            callback=_check_architectures,
            help="Compile the CUDA kernels too, for sm_90 and so on; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the native core ahead of its first use, for instance into a machine image."""
    from amp_plugin.kernels.build import SOURCES, build_library, build_region  # noqa: PLC0415 - loads torch

    try:
        library = build_library(SOURCES, rebuild=rebuild)
        region = build_region(library, SOURCES, rebuild=rebuild)
        cubins = _build_cuda(cuda) if cuda else 0
    except (OSError, RuntimeError, ValueError) as error:
        if as_json:
            print(json.dumps({"built": False, "reason": str(error)}))
        fail(str(error), code=1)
    seconds = library.seconds + region.seconds
    if as_json:
        paths = {"library": str(library.path), "region": str(region.path)}
        count = {"cubins": cubins} if cuda else {}
        print(json.dumps({"built": True, **paths, **count, "seconds": round(seconds, 1)}))
    else:
        state = f"compiled in {seconds:.1f} s" if seconds else "already compiled"
        print(f"{state}: {library.path}\n{' ' * len(state)}  {region.path}")
        if cuda:
            print(f"{cubins} CUDA kernels for {', '.join(cuda)} are in the cache")


def _build_cuda(architectures: list[str]) -> int:
    from amp_plugin.kernels.cuda.register import PACKAGES  # noqa: PLC0415 - loads torch

    try:
        from amp_plugin.kernels.cuda.compile import build_ahead  # noqa: PLC0415 - needs cuda-core
    except ImportError as error:
        msg = f"the CUDA kernels cannot be compiled: {error}; run: pip install {PACKAGES}"
        raise RuntimeError(msg) from error
    return build_ahead(architectures)


@app.command(context_settings=OF_SCRIPTS)
def casts(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    by: Annotated[
        str,
        word_option(("cast", "module", "op"), "What a row stands for."),
    ] = "cast",
    every: Annotated[bool, typer.Option("--every", help="A row for each module, siblings too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a script and list the casts that autocast makes in it; the exit code is the script's."""
    from amp_plugin.casting.cast_log import cast_table, log_casts  # noqa: PLC0415 - loads torch
    from amp_plugin.cli.casts import count_compiled_graphs, folded, rows  # noqa: PLC0415 - loads torch
    from amp_plugin.kernels.build import require_native  # noqa: PLC0415 - loads torch
    from amp_plugin.program import run_program  # noqa: PLC0415

    program = program_of(script, as_module=as_module, command="casts")
    try:
        require_native("amp-plugin casts")
    except (RuntimeError, ValueError) as error:
        fail(str(error), code=1)
    log, compiled_graphs = log_casts(), count_compiled_graphs()
    with output_of_script(as_json=as_json):
        ran = run_program(program, arguments or [], around=log)
    graphs = compiled_graphs()
    made = log.records() if every else folded(log.records())
    if as_json:
        print(json.dumps({"script": script, "by": by, "compiled_graphs": graphs, "rows": rows(made, by)}))
    elif len(log) or not ran.failed:
        table = cast_table(made, by)  # type: ignore[arg-type]
        table.caption = table.caption and _NO_CASTS
        show(table)
        if graphs:
            print(f"{graphs} compiled graphs: their casts are inside them and not in this table")
    raise typer.Exit(ran.code)


app.command(context_settings=OF_SCRIPTS)(run.run)
app.command(context_settings=OF_SCRIPTS)(numerics.diagnose)
app.command()(numerics.compare)
app.command(context_settings=OF_SCRIPTS)(tune.tune)
app.add_typer(rules.commands)


def _print_report(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    parts = {title: _rows(part) for title, part in report.items() if part and title != "healthy"}
    width = max(len(name) for rows in parts.values() for name, _ in rows)
    for title, rows in parts.items():
        console.print(f"[bold]{title.replace('_', ' ')}[/]")
        for name, value in rows:
            first, *others = _lines(_text(value), console.width - width - 4)
            console.print(f"  [cyan]{escape(name):<{width}}[/]  {escape(first)}")
            for line in others:
                console.print(f"  {'':<{width}}  {escape(line)}")
    console.print(
        "[green]All is well.[/]"
        if report["healthy"]
        else "[yellow]Something is missing or wrong: see the reasons.[/]"
    )


def _lines(text: str, width: int) -> list[str]:
    """Break text between words for a terminal; a path stays whole, to be copied."""
    if not sys.stdout.isatty():
        return [text]
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def _rows(part: Any) -> list[tuple[str, Any]]:
    if isinstance(part, list):
        return [
            (entry["device"], {key: value for key, value in entry.items() if key != "device"})
            for entry in part
        ]
    rows = ((_words(name), value) for name, value in part.items() if value not in ("", None, {}))
    return [("size", filesize.decimal(value)) if name == "bytes" else (name, value) for name, value in rows]


def _words(name: str) -> str:
    """Return a key of the report as words, names of settings and packages unchanged."""
    return name.replace("_", " ") if name.islower() and name != "amp_plugin" else name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_words(name)} {_text(item)}" for name, item in value.items())
    return str(value)
