"""The command ``accelerate launch`` in a process that runs already; what it starts is a new one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.warm_processes import ROOT, call


def launch(
    words: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
) -> CompletedProcess[str]:
    """Launch a script; return the exit status, the output and the errors of command and script."""
    return call(_command, list(words), environment=environment, folder=folder, frameworks=True)


def _command(words: list[str]) -> None:
    from accelerate.commands.accelerate_cli import main

    sys.argv = ["accelerate", "launch", *words]
    main()
