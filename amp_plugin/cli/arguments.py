"""What commands have in common: a script and its arguments, a device, `--json`, tables and errors."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Final, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from amp_plugin.program import Program, program_named, run_program

OF_SCRIPTS: Final = {"allow_interspersed_args": False}
"""Settings of commands that run a script: what follows it is its own."""

Script = Annotated[str, typer.Argument(help="A Python file to run; with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Device = Annotated[
    Literal["cpu", "cuda", "mps", "xpu"] | None,
    typer.Option(help="Device; default: a rules file's, or the best here."),
]


def program_of(script: str, *, as_module: bool, core_for: str = "") -> Program:
    """Return the program to run; a command that needs the native core names itself, and ends without it."""
    try:
        program = program_named(script, as_module=as_module)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SCRIPT") from error
    if core_for:
        from amp_plugin.kernels.build import require_native  # noqa: PLC0415 - loads torch

        try:
            require_native(f"amp-plugin {core_for}")
        except (RuntimeError, ValueError) as error:
            fail(str(error), code=1)
    return program


def show(table: Table) -> None:
    """Print a table without trailing blanks; in full width where the output is not a terminal."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if has_width else 10_000)
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip())


def run_script(
    program: Program,
    arguments: list[str] | None,
    around: contextlib.AbstractContextManager[object],
    *,
    as_json: bool,
    expected: type[BaseException] | tuple[()] = (),
) -> tuple[int, bool]:
    """Run a program; what it prints goes to standard error where standard output is one JSON object."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return run_program(program, arguments or [], around, expected=expected)


def fail(message: str, *, code: int) -> NoReturn:
    """Print an error to standard error and end the command."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    raise typer.Exit(code)
