"""How the commands print: tables without trailing blanks, errors in red."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(table: Table) -> None:
    """Print a table without trailing blanks, in full width if this is no terminal."""
    console = Console(highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = max(
            console.width, console.measure(table, options=console.options.update(width=10_000)).maximum
        )
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip())


def output_of_script(*, as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Send what a script prints to standard error where standard output is one JSON object."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def fail(message: str, *, code: int) -> NoReturn:
    """Print an error to standard error and end the command.

    Args:
        message: what was given, what is allowed, what to do next.
        code: the exit code.

    Raises:
        typer.Exit: always.
    """
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    raise typer.Exit(code)
