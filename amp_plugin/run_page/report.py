"""report(): write what precision does to a run into one HTML page, while it runs."""

from __future__ import annotations

import itertools
import os
import pickle
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, Final, Protocol

import torch
from filelock import FileLock, Timeout
from torch import distributed, nn
from torch.optim import Optimizer
from typing_extensions import Self

from amp_plugin.messages import warn_user
from amp_plugin.numerics.finding import Finding, rank_of_process
from amp_plugin.run_page.dtypes import Survey
from amp_plugin.run_page.flight import FlightRecorder, ranks
from amp_plugin.run_page.headroom import BUDGET, Headroom
from amp_plugin.run_page.history import History, Look
from amp_plugin.run_page.page import Facts, render, require_libraries
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.step_log import LoggedStep, StepLog

_SECONDS: Final = 10.0  # between two writes, at least
_MOST_NAMES: Final = 100
_pages = itertools.count()  # every rank makes its pages in the same order
_PACKAGES: Final = ("accelerate", "lightning", "pytorch_lightning", "transformers")


class OtherRanks:
    """The looks of the ranks that write no page."""

    def __init__(self) -> None:
        self._name = f"amp_plugin/page/{next(_pages)}"

    def send(self, looks: Sequence[Look]) -> None:
        """Leave what this rank has found so far where rank 0 finds it."""
        if ranks() > 1:
            _store().set(f"{self._name}/{distributed.get_rank()}", pickle.dumps(tuple(looks)))

    def received(self) -> Iterator[Look]:
        """Return what the others have left by now."""
        for rank in range(1, ranks()):
            key = f"{self._name}/{rank}"
            if _store().check([key]):
                yield from pickle.loads(_store().get(key))  # noqa: S301 -- a rank of this run wrote it


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415 -- absent in some builds

    return _get_default_store()


class HasStepLog(Protocol):
    """A GradScaler, AmpPrecision, FabricAmpPrecision or AmpAccelerator."""

    @property
    def step_log(self) -> StepLog:
        """The log of the steps."""


class RunReport:
    """A page that follows a run while the block is open; see ``report``.

    Args:
        scaler, model, path: As for ``report``.
        options: A dataclass of what the run was asked to do, for the page; or None.
        skips: Whether steps that are not finite are skipped.

    Attributes:
        path: Where the page lies; of rank 0, which writes it.
        looks: What was found in steps that went wrong, in order.
        history: The steps.
    """

    def __init__(
        self,
        scaler: HasStepLog,
        model: nn.Module,
        path: str | Path,
        *,
        options: object,
        skips: bool = True,
    ) -> None:
        require_libraries()
        self._scaler, self._log, self._model = scaler, scaler.step_log, model
        self.path = Path(path)
        self._options = options
        self.looks: list[Look] = []
        self._others = OtherRanks()
        self.history = History()
        self._survey, self._headroom = Survey(model), Headroom(model)
        self._flight = FlightRecorder(self._log, model, self._take_findings, watches=skips)
        self._optimizers: dict[int, Optimizer] = {}
        self._open = ExitStack()
        self._writes = (rank_of_process() or 0) == 0
        self._written, self._cost = 0.0, 0.0
        self._began, self._state = _now(), "running"

    def __enter__(self) -> Self:
        """Start to follow the run, and write a first page.

        Raises:
            OSError: The page cannot be written there.
        """
        with ExitStack() as stack:
            if self._writes:
                self.path = _claimed(self.path, stack)
            self._survey.open()
            stack.callback(self._survey.close)
            self._flight.open()
            stack.callback(self._flight.close)
            self._log.hear_loss = self.history.hear_loss
            stack.callback(setattr, self._log, "hear_loss", None)
            self._log.subscribe(self._look, first=True)
            stack.callback(self._log.unsubscribe, self._look)
            if self._writes:
                self.write()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and write the last page; it says what ended the run."""
        with self._open:
            if error is None:
                self._log.read(wait=True)
            self._flight.close()
            self._survey.close()
            first_line = shorten(str(error).partition("\n")[0], 200, placeholder=" ...")
            self._state = "finished" if error is None else f"ended by {type(error).__name__}: {first_line}"
            if self._writes:
                self._try_to_write()

    def _look(self, step: LoggedStep) -> None:
        optimizer = step.optimizer()
        if optimizer is None or self._log.replaying:
            return
        if id(optimizer) not in self._optimizers:
            self._meet(optimizer)
        self._survey.close()
        self.history.add(step)
        if step.result.skipped:
            overflowed = step.result.overflow_report()
            self._headroom.note_overflow(self.history.steps, (*overflowed.inf, *overflowed.nan))
        elif self._headroom.is_due():
            self._headroom.read(self.history.steps, step.result)
        self._flight.look(step, is_wrong=self.history.is_wrong)
        waited = time.perf_counter() - self._written
        if self._writes and waited > max(_SECONDS, self._cost / BUDGET):
            self._try_to_write()

    def _meet(self, optimizer: Optimizer) -> None:
        """Name the parameters of an optimizer that nobody has named."""
        self._optimizers[id(optimizer)] = optimizer
        if isinstance(self._scaler, GradScaler):
            own = {id(param) for group in optimizer.param_groups for param in group["params"]}
            names = {name: param for name, param in self._model.named_parameters() if id(param) in own}
            self._scaler.register(optimizer, names=names)

    def _take_findings(self, findings: Sequence[Finding], how: str) -> None:
        self.looks.append(self.history.explain(findings, how))
        self._written = 0.0  # worth a page
        if not self._writes:
            self._others.send(self.looks)

    def _try_to_write(self) -> None:
        """Write the page; a disk that is full ends no training."""
        try:
            self.write()
        except OSError as error:
            warn_user(f"the report {self.path} could not be written: {error}; training goes on")

    def write(self) -> None:
        """Write the page as it is now; the file is replaced in one go."""
        start = time.perf_counter()
        text = render(self._facts())
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._written = time.perf_counter()
        self._cost = self._written - start

    def _facts(self) -> Facts:
        modules = self._headroom.modules
        options = fields(self._options) if is_dataclass(self._options) else ()
        limits = {name: torch.finfo(self._survey.dtype_of(name)).max for name in modules}
        return Facts(
            title=Path(sys.argv[0]).name or "python",
            name=self.path.name,
            state=self._state,
            began=self._began,
            written=_now(),
            history=self.history,
            headroom=self._headroom,
            limits=limits,
            dtypes={name: str(self._survey.dtype_of(name)).removeprefix("torch.") for name in modules},
            tree=self._survey.tree(self._optimizers.values()),
            rules=self._survey.rules_unlike_torchs(),
            looks=sorted([*self.looks, *self._others.received()], key=lambda look: look.step),
            surroundings=self._surroundings(),
            unseen=self._unseen(),
            options={option.name: str(getattr(self._options, option.name)) for option in options},
            command=shlex.join(sys.orig_argv),
        )

    def _unseen(self) -> list[str]:
        """Return a sentence for each kind of step of which the page shows less, or nothing."""
        texts = []
        if self._flight.unseen:
            texts.append(
                f"At {self._flight.unseen} or more of {self.history.steps} steps the model's call was not "
                "seen: it ran in compiled code, or was not a call of the model given. Loss scale, skips, "
                "norms and gradients are drawn all the same; the loss, and what modules compute, are not."
            )
        if self._log.has_captured:
            texts.append(
                "Steps captured in a CUDA graph are not drawn, since the host does not learn of each replay; "
                f"skipped in all, replays included: {self._log.skipped_steps()}."
            )
        return texts

    def _surroundings(self) -> dict[str, str]:
        device = next((param.device for param in self._model.parameters()), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        found = {"python": sys.version.partition(" ")[0], "torch": torch.__version__}
        found["amp_plugin"] = sys.modules["amp_plugin"].__version__
        loaded = [package for package in _PACKAGES if package in sys.modules]
        found |= {package: sys.modules[package].__version__ for package in loaded}
        ranks = os.environ.get("WORLD_SIZE", "1")
        found |= {
            "device": name,
            "ranks": ranks,
            "seed": str(torch.initial_seed()),
            "folder": str(Path.cwd()),
        }
        return found


def report(scaler: HasStepLog, model: nn.Module, path: str | Path = "run.html") -> RunReport:
    """Write what precision does to a run into one HTML page, rewritten while the block is open.

    The page shows loss scale, skipped steps, norms and loss; how near each module's gradients come to the
    ends of their dtype; the dtypes of the model; and what was wrong with a skipped step: the last window's
    batches are kept, so a skipped step is run again under :func:`diagnose` at once. It opens from disk
    without a network.

    The host waits for the device after each step. Gradients are read in at most 0.25 % of the time. The
    weights are those of a run without a page.

    Args:
        scaler: What steps: a GradScaler (disabled in bf16 and fp32), a Fabric or Trainer plugin, or an
            AmpAccelerator.
        model: What is trained; names its modules.
        path: The page. While another run writes it, this one takes the next free name (``run-2.html``). Only
            rank 0 writes.

    Returns:
        A context manager; ``path`` is where the page lies.

    Raises:
        ImportError: The packages of the extra ``report`` are missing.

    Example:
        >>> import tempfile
        >>> from amp_plugin import GradScaler, report
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> with tempfile.TemporaryDirectory() as folder, report(scaler, model, f"{folder}/run.html") as page:
        ...     for batch in torch.ones(3, 4, 2):
        ...         scaler.scale(model(batch).mean()).backward()
        ...         value = scaler.step(optimizer)
        ...         scaler.update()
        ...         optimizer.zero_grad()
        ...     page.history.steps
        3
    """
    if isinstance(scaler, GradScaler):
        enabled = scaler.is_enabled()
        return RunReport(scaler, model, path, options=scaler.loss_scale.options if enabled else None)
    return RunReport(scaler, model, path, options=getattr(scaler, "settings", None))


def _claimed(path: Path, stack: ExitStack) -> Path:
    """Return the path, or the next one that no other run writes, locked until the stack ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, _MOST_NAMES):
        chosen = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        lock = FileLock(chosen.with_name(f".{chosen.name}.lock"), timeout=0)
        try:
            stack.enter_context(lock)
        except Timeout:
            continue
        return chosen
    msg = f"{path}: {_MOST_NAMES} runs write pages of this name; give another one"
    raise OSError(msg)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M:%S UTC")
