"""The command `amp-plugin run`: run a program that is not edited under op rules."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amp_plugin.cli.arguments import Arguments, AsModule, Script, fail, program_of

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules

Rules = Annotated[
    Path,
    typer.Option("--rules", exists=True, dir_okay=False, help="Op rules that autocast follows, a YAML file."),
]


def run(script: Script, rules: Rules, arguments: Arguments = None, as_module: AsModule = False) -> None:
    """Run a script under op rules; torch.autocast follows them. The exit code is the script's.

    The script need not know this package. What is taken over is given back when it ends.
    """
    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - loads torch
    from amp_plugin.kernels.build import require_native  # noqa: PLC0415 - loads torch
    from amp_plugin.program import run_program  # noqa: PLC0415 - loads torch

    program = program_of(script, as_module=as_module, command="run")
    try:
        require_native("amp-plugin run --rules")
        chosen = OpRules.from_yaml(rules)
    except (OSError, RuntimeError, ValueError) as error:
        fail(str(error), code=2)
    ran = run_program(program, arguments or [], around=Takeover(rules_door(chosen, str(rules))))
    raise typer.Exit(ran.code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """One thing that is taken over.

    Attributes:
        words: what happens, for the user.
        region: takes it when it is entered, and gives it back when it is left.
    """

    words: str
    region: AbstractContextManager[object]


class Takeover:
    """Take things over for the length of a program, say so, and give them back in the reverse order."""

    def __init__(self, *doors: Door) -> None:
        self._doors = doors
        self._open = ExitStack()

    def __enter__(self) -> None:
        """Take over."""
        for door in self._doors:
            self._open.enter_context(door.region)
            print(f"amp-plugin run: {door.words}", file=sys.stderr)

    def __exit__(self, *exc_info: object) -> None:
        """Give back."""
        self._open.close()


def rules_door(rules: OpRules, name: str) -> Door:
    """Return the door by which torch.autocast follows the rules of a file."""
    from amp_plugin.casting.bound_rules import BoundRules  # noqa: PLC0415 - loads torch

    return Door(words=f"torch.autocast on {rules.device_type} follows {name}", region=BoundRules(rules, name))
