"""Run ``accelerate launch``, ``torchrun`` and ``amp-plugin run`` in an existing process."""

import multiprocessing.process
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.warm_processes import ROOT, call


def launch(
    words: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
) -> CompletedProcess[str]:
    """Launch a script; return the exit status, the output and the errors of command and script."""
    return call(_launch, list(words), environment=environment, folder=folder, frameworks=True)


def torchrun(*words: str, environment: Mapping[str, str], folder: Path) -> CompletedProcess[str]:
    """Do what ``torchrun WORDS`` does."""
    from torch.distributed.run import main

    return call(main, list(words), environment=environment, folder=folder)


def run_unedited(
    *words: str,
    environment: Mapping[str, str],
    folder: Path,
    frameworks: bool = False,
    command: str = "run",
) -> CompletedProcess[str]:
    """Do what ``amp-plugin run WORDS`` does, or ``amp-plugin report WORDS``."""
    return call(_run, [command, *words], environment=environment, folder=folder, frameworks=frameworks)


def _launch(words: list[str]) -> None:
    from accelerate.commands.accelerate_cli import main

    sys.argv = ["accelerate", "launch", *words]
    main()


def _run(words: Sequence[str]) -> None:
    from amp_plugin.cli import app

    # children of multiprocessing, such as a loader's workers, print only a summary
    multiprocessing.process._parent_process = None
    # otherwise it could not start other processes
    multiprocessing.process.current_process()._config["daemon"] = False
    sys.path.insert(0, "")
    sys.argv = ["amp-plugin", *words]
    app()
