"""Processes that start as copies of this one before its first test, with the tests' imports already done.

:func:`keep_copy` forks one copy. It runs no test, has no other thread, and ends with this process. For each
:class:`CopiedProcess` it forks a guard. The guard starts the process, reports how it ended, and kills it if
nobody waits for it.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

_to_copy: list[socket.socket] = []


def keep_copy() -> None:
    """Fork the copy. On a machine with a GPU this is not done, because its driver does not survive a fork."""
    if torch.cuda.is_available():
        return
    ours, its = socket.socketpair()
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork, because xdist has a thread
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        ours.close()
        _end_after(_fork_guards, its)
    its.close()
    _to_copy[:] = [ours]


def copy_is_kept() -> bool:
    """Return whether there is a copy to start processes from."""
    return bool(_to_copy)


class CopiedProcess:
    """A process that calls a function, with the methods of ``multiprocessing.Process``."""

    name = "copied process"

    def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        self._target, self._args = target, args
        self.exitcode: int | None = None

    def start(self) -> None:
        """Start the process."""
        self._to_guard, its = Pipe()
        with its:
            socket.send_fds(_to_copy[0], [b"+"], [its.fileno()])
        self._to_guard.send((self._target, self._args))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the process. ``exitcode`` is None if it is still running."""
        if self.exitcode is None and self._to_guard.poll(seconds):
            self.exitcode = self._to_guard.recv()

    def kill(self) -> None:
        """Kill the process if it runs. Its guard does so when the connection closes."""
        if self.exitcode is None:
            with contextlib.suppress(BrokenPipeError):  # it has ended in the meantime
                self._to_guard.send(None)


def _fork_guards(tests: socket.socket) -> None:
    """Fork a guard for each connection that the tests send, until the tests end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, connections, *_ = socket.recv_fds(tests, 1, 1)
        if not message:
            return
        (connection,) = connections
        if os.fork() == 0:
            tests.close()
            _end_after(_guard, Connection(connection))
        os.close(connection)


def _guard(tests: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    target, args = tests.recv()
    process = multiprocessing.get_context("fork").Process(
        target=_as_in_a_new_interpreter, args=(target, args)
    )
    process.start()
    if process.sentinel not in wait([process.sentinel, tests]):
        process.kill()
    process.join()
    with contextlib.suppress(BrokenPipeError):
        tests.send(process.exitcode)


def _end_after(function: Callable[[Any], None], argument: object) -> NoReturn:
    """Call a function, and end this process without running any code of the parent."""
    try:
        function(argument)
        os._exit(0)
    finally:
        os._exit(1)


def _as_in_a_new_interpreter(target: Callable[..., object], args: tuple[object, ...]) -> None:
    """Call the target without pytest's changes to the interpreter."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 -- as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    # If a test has imported torch's own test helpers, they forbid setting the flags of backends.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    _copy_what_is_spawned()
    target(*args)


def _copy_what_is_spawned() -> None:
    """Start processes that ``multiprocessing`` spawns here as copies too.

    They unpickle their task as a new interpreter does.
    """
    start = multiprocessing.util.spawnv_passfds

    def start_or_copy(path: bytes, words: list[str], descriptors: list[int]) -> int:
        *_, program, purpose = words
        if purpose != "--multiprocessing-fork":
            return start(path, words, descriptors)
        child = os.fork()
        if child == 0:
            sys.argv = ["-c", purpose]
            _end_as(program)
        return child

    multiprocessing.util.spawnv_passfds = start_or_copy


def _end_as(program: str) -> NoReturn:
    """Run a program and end this process with its exit status."""
    status = 1
    try:
        exec(program, {})
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)
