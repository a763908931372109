"""Separate processes that start in milliseconds, forked from a process that has imported torch.

Use them if a new process is needed but not a new interpreter: ranks, programs that load the native core,
concurrent builds. Tests of imports, and of settings that must exist at the very start (``LD_LIBRARY_PATH``,
``-W error``), need a new interpreter, by ``subprocess``.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

from tests.copied_process import CopiedProcess, copy_is_kept

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(PRELOADED)


class WarmProcess:
    """A process that calls a function of a module, with its output in files.

    With ``frameworks``, the frameworks and the native core are already loaded, as in this process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        frameworks: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-process-")
        self._files = [Path(self._folder.name, name) for name in ("output", "errors")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        task = (self._files, variables, folder, function, arguments)
        if frameworks and copy_is_kept():
            self._process = CopiedProcess(target=_call, args=task)
        else:
            self._process = _forked.Process(target=_call, args=task, daemon=True)
        self._process.start()

    def errors(self) -> str:
        """Return what the process has written to standard error so far."""
        return self._text(self._files[1])

    def kill(self) -> None:
        """Kill the process if it runs, wait for its end, and remove its output."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def wait(self, seconds: float) -> CompletedProcess[str]:
        """Wait for the end of the process. Return exit status, output and errors.

        Raises TimeoutExpired if it takes too long.
        """
        self._process.join(seconds)
        if self._process.exitcode is None:
            said = self.errors()
            self.kill()
            raise TimeoutExpired(self._process.name, seconds, stderr=said)
        output, errors = (self._text(path) for path in self._files)
        self._folder.cleanup()
        return CompletedProcess(self._process.name, self._process.exitcode, output, errors)

    @staticmethod
    def _text(file: Path) -> str:
        """Return the content of a file, or nothing if the process ended before it opened the file."""
        return file.read_text() if file.exists() else ""


def call(
    function: Callable[..., object],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    frameworks: bool = False,
) -> CompletedProcess[str]:
    """Call a function in a process of its own. Return its exit status, output and errors."""
    process = WarmProcess(function, *arguments, environment=environment, folder=folder, frameworks=frameworks)
    return process.wait(800)


def run_program(
    program: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    *,
    frameworks: bool = False,
) -> CompletedProcess[str]:
    """Run a Python file in a process of its own. Return its exit status, output and errors."""
    words = (runpy.run_path, str(program), None, "__main__")
    return call(*words, environment=environment, folder=folder, frameworks=frameworks)


def call_on_ranks(
    count: int, seconds: float, function: Callable[..., object], *arguments: Any, **variables: str
) -> list[CompletedProcess[str]]:
    """Call a function in parallel processes that have the variables of torchrun.

    Return how each rank ended. Ranks that take longer than ``seconds`` are killed.
    """
    shared = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        WarmProcess(
            function, *arguments, environment={**shared, **_variables_of(rank, count)}, frameworks=True
        )
        for rank in range(count)
    ]
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _variables_of(rank: int, count: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    ranks |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {"TORCHELASTIC_RUN_ID": "test", **{name: str(value) for name, value in ranks.items()}}


def _call(
    files: list[Path],
    variables: dict[str, str],
    folder: Path,
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    for descriptor, path in enumerate(files, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [function.__name__]
    function(*arguments)
