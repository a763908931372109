"""``report()`` writes an HTML page about a run's numerics while the run goes on."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, Final

import torch
from filelock import FileLock, Timeout
from torch import distributed, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from amp_plugin.kernels.tracers import untraced
from amp_plugin.messages import only_warning
from amp_plugin.numerics.first_module import ModuleWatch
from amp_plugin.numerics.growth import WeightGrowth
from amp_plugin.numerics.op import is_watched
from amp_plugin.patches import random_numbers_kept
from amp_plugin.run_page.dtypes import Survey
from amp_plugin.run_page.headroom import BUDGET, Headroom, named_parameters
from amp_plugin.run_page.history import History
from amp_plugin.run_page.libraries import require_libraries
from amp_plugin.run_page.page import render
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.overflows import OverflowReport, names_of
from amp_plugin.scaling.ranks import rank_of_process
from amp_plugin.scaling.step_log import StepLog, StepResult, new_logs

_SECONDS: Final = 10.0  # the shortest time between two writes
_MOST_GROWTHS: Final = 20  # the growth of weights is read at most this often, at steps that went wrong
_PACKAGES: Final = ("torch", "amp_plugin", "accelerate", "lightning", "pytorch_lightning", "transformers")


class RunReport:
    """A page that follows a run while its block is open; see ``report``.

    It only reads. If it fails, it gives one warning and stops, and the run continues.

    Attributes:
        path: The path of the page, which rank 0 writes.
        history: The history of the steps.
    """

    def __init__(
        self,
        log: StepLog,
        models: nn.Module | Sequence[nn.Module],
        path: str | Path,
        *,
        options: object = None,  # a dataclass of options, shown on the page
    ) -> None:
        require_libraries()
        self._log, self._options = log, options
        self.path = Path(path)
        self.history = History()
        self._growth, self._growth_looks = WeightGrowth(), 0
        self._optimizers: list[Optimizer] = []
        self._open = ExitStack()
        self._writes = (rank_of_process() or 0) == 0
        self._next_write = 0.0  # a time of time.perf_counter()
        self._began, self._state = _now(), "running"
        self._take(models)

    def _take(self, models: nn.Module | Sequence[nn.Module]) -> None:
        self._models = [models] if isinstance(models, nn.Module) else list(models)
        self._survey, self._headroom = Survey(self._models), Headroom(self._models)
        self._modules = ModuleWatch(self._log, self._models)

    def __enter__(self) -> Self:
        """Start to follow the run, and write a first page.

        Raises:
            OSError: The page cannot be written to this path.
        """
        with random_numbers_kept(), ExitStack() as stack:
            if self._writes:
                self.path = _claimed(self.path, stack)
                with only_warning(self._name, lambda: None):
                    self.write()
                stack.callback(self._try_to_write)
            stack.enter_context(self._log.watched(self._look, self._hear))
            stack.callback(self._unfollow)
            self._growth.add(self._models)
            self._survey.open()
            self._modules.open()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and write the last page, which says how the run ended."""
        with random_numbers_kept(), self._open:
            if error is None:
                self._log.read(wait=True)
            first_line = shorten(str(error).partition("\n")[0], 200, placeholder=" ...")
            self._state = "finished" if error is None else f"ended by {type(error).__name__}: {first_line}"
        self._optimizers.clear()
        self._take([])  # drop all references to the run

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Start to follow these models."""
        with only_warning(self._name, self._give_up):
            if models != self._models:
                self._unfollow()
                self._take(models)
                self._growth.add(self._models)
                self._survey.open()
                self._modules.open()

    def _unfollow(self) -> None:
        self._survey.close()
        self._modules.close()

    @property
    def _name(self) -> str:
        return f"the report {self.path}"

    def _give_up(self) -> None:
        """Stop following the run."""
        self._writes = False
        self._open.close()

    @untraced
    def _hear(self, loss: object) -> None:
        with only_warning(self._name, self._give_up):
            self.history.hear_loss(loss)

    def _look(self, step: StepResult) -> None:
        with only_warning(self._name, self._give_up):
            self._take_step(step)

    def _take_step(self, step: StepResult) -> None:
        optimizer = step.optimizer()
        if optimizer is None:
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._survey.close()
        overflowed = self._named(step.overflow_report(), optimizer) if step.skipped else None
        self.history.add(step, overflowed)
        if self.history.is_wrong and self._growth_looks < _MOST_GROWTHS:
            self._growth_looks += 1
            self.history.note_growth(self._growth.factor())
        if overflowed is not None:
            self._headroom.note_overflow(self.history.steps, (*overflowed.inf, *overflowed.nan))
        elif self._headroom.is_due():
            self._headroom.read(self.history.steps, step)
        if self._writes and time.perf_counter() > self._next_write:
            with random_numbers_kept():
                self._try_to_write()

    def _named(self, report: OverflowReport, optimizer: Optimizer) -> OverflowReport:
        """Return the report with the model's names for parameters without a name."""
        names = {id(param): name for name, param in named_parameters(self._models)}
        params = list(params_of(optimizer))
        numbered = names_of(params, optimizer, {})
        known = {number: names.get(id(param), number) for number, param in zip(numbered, params, strict=True)}
        inf, nan = (tuple(known.get(name, name) for name in given) for given in (report.inf, report.nan))
        return replace(report, inf=inf, nan=nan, named=report.named or not {*inf, *nan} & {*numbered})

    def _try_to_write(self) -> None:
        """Write the page. If that fails, for example on a full disk, warn."""
        if self._writes:
            with only_warning(self._name, self._give_up):
                self.write()

    def write(self) -> None:
        """Write the present page. The file is replaced atomically."""
        start = time.perf_counter()
        dtypes = {name: self._survey.dtype_of(name) for name in self._headroom.modules}
        text = render(self.history, self._headroom, dtypes, **self._facts())
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            unfinished.write_text(
                text, encoding="utf-8", errors="backslashreplace"
            )  # file names may contain bytes that are not UTF-8
            unfinished.replace(self.path)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        now = time.perf_counter()
        self._next_write = now + max(_SECONDS, (now - start) / BUDGET)

    def _facts(self) -> dict[str, Any]:
        options = fields(self._options) if is_dataclass(self._options) else ()
        device = next((param.device for _, param in named_parameters(self._models)), torch.device("cpu"))
        surroundings: dict[str, object] = {
            "python": platform.python_version(),
            **{name: sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device,
            "ranks": _ranks(),
            "seed": torch.initial_seed(),
            "folder": Path.cwd(),
        }
        return {
            "title": Path(sys.argv[0]).name or "python",
            "name": self.path.name,
            "state": self._state,
            "began": self._began,
            "written": _now(),
            "trees": self._survey.trees(self._optimizers),
            "diagnose": _diagnose(),
            "unseen": self._unseen(),
            "surroundings": surroundings,
            "options": {option.name: getattr(self._options, option.name) for option in options},
            "command": shlex.join(sys.orig_argv),
        }

    def _unseen(self) -> list[str]:
        """Return one sentence for each kind of step that the page cannot show completely."""
        texts = []
        if self._log.has_captured:
            skipped = f"skipped in all, replays included: {self._log.skipped_steps()}."
            texts.append(
                "Steps captured in a CUDA graph are not drawn, because replays do not run Python code; "
                f"{skipped}"
            )
        return texts


def report(scaler: Any, model: nn.Module, path: str | Path = "run.html") -> RunReport:
    """Write an HTML page about a run's numerics, and keep it up to date while the block is open.

    The page shows the loss scale, skipped steps, gradient norms and the loss. It shows how near each module's
    gradients come to the limits of their dtype, and the dtypes of the model. From the second skip on it names
    the module at which a step went wrong; `amp-plugin diagnose` finds the op and its line. The page opens
    from disk without a network.

    The host waits for the device after each step. Reading gradients takes at most 0.25 % of the time. The
    page does not change the trained weights.

    Args:
        scaler: The object that steps the optimizers: a GradScaler (a disabled one in bf16 and fp32), a Fabric
            or Trainer plugin, or an AmpAccelerator.
        model: The model that is trained. The page uses the names of its modules.
        path: The path of the page. If another run is writing it, this run takes the next free name
            (``run-2.html``). Only rank 0 writes.

    Returns:
        A context manager. Its ``path`` is the path of the page.

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
    own = scaler.loss_scale.options if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
    options = own or getattr(getattr(scaler, "session", None), "options", None)
    log = scaler.core.log if isinstance(scaler, GradScaler) else scaler.step_log
    return RunReport(log, model, path, options=options)


def _claimed(path: Path, stack: ExitStack) -> Path:
    """Return the first path that no other run is writing, and lock it until the stack is closed."""
    if is_watched():  # diagnose repeats the user's run, and must not overwrite that run's page
        path = path.with_name(f"{path.stem}-diagnose{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    number, chosen = 1, path
    while True:
        with suppress(Timeout):
            stack.enter_context(FileLock(chosen.with_name(f".{chosen.name}.lock"), timeout=0))
            return chosen
        number += 1
        chosen = path.with_name(f"{path.stem}-{number}{path.suffix}")


def _diagnose() -> str:
    """Return the command that finds the op and the line at which this program goes wrong."""
    program = sys.argv if sys.argv[0].endswith(".py") else ["train.py"]
    return shlex.join(["amp-plugin", "diagnose", *program])


def _ranks() -> int:
    """Return the number of processes that train together."""
    joined = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if joined else 1


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M:%S UTC")


@contextmanager
def program_page(path: Path, program: str) -> Iterator[None]:
    """Keep a page about the program that runs inside the block. At the end, print where the page is.

    The page follows a scaler, plugin or accelerator of this package: the last one that was made before the
    model is first called. If the program has none, it follows all optimizer steps, just before they are
    taken.
    """
    logs: list[weakref.ref[StepLog]] = []
    pages: list[RunReport] = []
    # Created before the program runs, so it cannot be one of the program's scalers.
    observer = GradScaler("cpu", enabled=False)

    def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
        observer.core.measure(optimizer)
        observer.core.note_step(optimizer)

    def begin(module: nn.Module, _: Any) -> None:
        """Follow the first module that is called in training mode."""
        trained = module.training and torch.is_grad_enabled() and not is_compiling()
        if pages or not trained or not any(param.requires_grad for param in module.parameters()):
            return
        made = [log for reference in logs if (log := reference()) is not None]
        if not made:
            opened.callback(register_optimizer_step_pre_hook(before_step).remove)
        pages.append(RunReport(made[-1] if made else observer.core.log, module, path))
        opened.enter_context(pages[0])

    try:
        with ExitStack() as opened:
            opened.callback(register_module_forward_pre_hook(begin).remove)
            opened.enter_context(new_logs(lambda log: logs.append(weakref.ref(log))))
            yield
    finally:
        if pages:
            print(f"amp-plugin: {program} is drawn in {pages[0].path}", file=sys.stderr)
    if not pages:
        print(
            f"amp-plugin: no page was written, because {program} has called no model that is trained, or "
            "only in compiled code; write `with amp_plugin.report(scaler, model, path):` around the "
            "loop",
            file=sys.stderr,
        )
