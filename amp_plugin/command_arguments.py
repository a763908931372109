"""Arguments that several commands take: a script, words of a list, `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from amp_plugin.did_you_mean import did_you_mean
from amp_plugin.program import Program, program_named

Script = Annotated[str, typer.Argument(help="A Python file to run; with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def program_of(script: str, *, as_module: bool, command: str) -> Program:
    """Return the program that a command is to run.

    Raises:
        typer.BadParameter: There is none of this name.
    """
    try:
        return program_named(script, as_module=as_module, command=command)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SCRIPT") from error


def word_option(
    allowed: Iterable[str],
    purpose: str,
    *,
    name: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Any:
    """Return an option whose value is one of some words.

    Args:
        allowed: The words.
        purpose: What the option is for.
        name: Of the option; None: the parameter's.
        aliases: Other names of words, for the hint of the error.
    """
    words = tuple(allowed)

    def check(given: str | None) -> str | None:
        if given is None or given in words:
            return given
        hint = did_you_mean(given, words, aliases=aliases, written=repr)
        msg = f"{given!r} is not one of {', '.join(map(repr, words))}{hint}"
        raise typer.BadParameter(msg)

    names = () if name is None else (name,)
    return typer.Option(*names, metavar="|".join(words), callback=check, help=purpose)
