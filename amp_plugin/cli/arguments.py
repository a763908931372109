"""Define the arguments that several commands share. Run scripts, and print tables and errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from amp_plugin.casting.bound_rules import ours_by_default
from amp_plugin.program import Program, mentions, program_named, reads_arguments, run_program


class ScriptCommand(TyperCommand):
    """A command that runs a script, and passes all arguments after the script's name to the script.

    If an argument after the script's name is also an option of the command, the command prints whether the
    script or the command gets the argument. Arguments that match an option go to the command if the script
    reads no arguments. Nothing is printed if the script reads arguments and its source mentions the option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Separate the arguments of the script from the options of the command."""
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        script, behind = str(given.get("script") or ""), [*(given.get("arguments") or ())]
        known = {name for param in self.params for name in param.opts if name.startswith("-")}
        own = [word for word in _before_dashes(behind) if word.partition("=")[0] in known]
        script_reads = bool(script and own) and (given.get("as_module") or reads_arguments(script))
        if script_reads:  # options that the script has too are meant for the script
            own = [word for word in own if not mentions(script, word.partition("=")[0])]
        if script and own:
            options, command = " ".join(own), f"amp-plugin {ctx.info_name}"
            if script_reads:
                said = (
                    f"stands after {script}, so {script} gets it; to give it to {command}, write it before "
                    f"{script}"
                )
            else:
                ctx.allow_interspersed_args = ctx.ignore_unknown_options = True
                said = (
                    f"is an option of {command}, because {script} reads no arguments; write it before "
                    f"{script}"
                )
            print(f"{command}: {options} {said}", file=sys.stderr, flush=True)
        return super().parse_args(ctx, args)


def _before_dashes(words: list[str]) -> list[str]:
    return words[: words.index("--")] if "--" in words else words


Script = Annotated[str, typer.Argument(help="The Python file to run, or with -m the module.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Device = Annotated[
    Literal["cpu", "cuda", "mps", "xpu"] | None,
    typer.Option(help="The device type. Default: that of the rules file, or this machine's accelerator."),
]


def program_of(script: str, *, as_module: bool, core_for: str = "") -> Program:
    """Return the program to run.

    If ``core_for`` is given and the native core is missing, the command ends with an error.
    """
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
    """Print a table without trailing blanks.

    If the output is not a terminal and ``COLUMNS`` is not set, the table is printed at its full width.
    """
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
    """Run a program under the default op rules of amp_plugin, unless the program sets other rules.

    If ``as_json`` is True, the program's output goes to standard error.
    """
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        return run_program(program, arguments or [], _under_our_rules(around), expected=expected)


@contextlib.contextmanager
def _under_our_rules(around: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with ours_by_default(), around:
        yield


def fail(message: str, *, code: int) -> NoReturn:
    """Print an error to standard error and end the command."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    raise typer.Exit(code)
