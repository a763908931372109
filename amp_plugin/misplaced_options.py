"""Tell of options that stand after a script and go to it, though the command has options of that name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape


def warn_of_misplaced_options(context: typer.Context, script: str, arguments: Sequence[str]) -> None:
    """Warn, on standard error, of each of the command's own options among a script's arguments.

    The script gets them all the same: it may have options of that name. What follows ``--`` is meant for it.

    Args:
        context: of the command.
        script: as the user named it.
        arguments: what follows it.
    """
    options = {name: option for option in context.command.params for name in option.opts}
    moved, kept = _split(options, arguments)
    if not moved:
        return
    names = [word.partition("=")[0] for word in moved if word.startswith("--")]
    goes, it_is = ("go", "they are") if len(names) > 1 else ("goes", "it is")
    module = ["-m"] if context.params.get("as_module") else []
    command = str(context.info_name)
    right = shlex.join(["amp-plugin", command, *moved, *module, script, *kept])
    text = (
        f"{' and '.join(names)} after {script} {goes} to the script; if {it_is} meant for {command}, "
        f"write: {right}"
    )
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold yellow]warning:[/] {escape(text)}")


def _split(options: dict[str, Any], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's options among a script's arguments, with their values, and all else."""
    moved: list[str] = []
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        option = options.get(word.partition("=")[0]) if word.startswith("--") else None
        if word == "--":
            kept += [word, *words]
        elif option is None or word == "--help":
            kept.append(word)
        elif option.is_flag or "=" in word:
            moved.append(word)
        else:
            moved += [word, *([value] if (value := next(words, None)) is not None else [])]
    return moved, kept
