"""Write the run report, an HTML file about a run's numerics, during the run."""

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

_SECONDS: Final = 10.0  # wait at least this many seconds between two writes to the file
# After this many skipped or non-finite steps, the growth of the weights is not measured any more.
_MOST_GROWTHS: Final = 20
_PACKAGES: Final = ("torch", "amp_plugin", "accelerate", "lightning", "pytorch_lightning", "transformers")


class RunReport:
    """The context manager that ``report`` returns, which watches a training run while its block is open.

    The report only reads from the run. If the report fails, it gives one warning and stops, and the run
    continues.

    Attributes:
        path: The path of the HTML file, which only rank 0 writes.
        history: The history of the optimizer steps.
    """

    def __init__(
        self,
        log: StepLog,
        models: nn.Module | Sequence[nn.Module],
        path: str | Path,
        *,
        options: object = None,  # a dataclass whose fields the report shows as options
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
        """Start watching the run, and write the file for the first time.

        Raises:
            OSError: The file cannot be written to this path.
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
        """Stop watching, and write the file for the last time. The file then says how the run ended."""
        with random_numbers_kept(), self._open:
            if error is None:
                self._log.read(wait=True)
            first_line = shorten(str(error).partition("\n")[0], 200, placeholder=" ...")
            self._state = "finished" if error is None else f"ended by {type(error).__name__}: {first_line}"
        self._optimizers.clear()
        self._take([])  # drop all references to models

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Watch these models from now on."""
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
        """Stop watching the run."""
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
        """Return the overflow report, in which parameters have the model's names instead of numbers."""
        names = {id(param): name for name, param in named_parameters(self._models)}
        params = list(params_of(optimizer))
        numbered = names_of(params, optimizer, {})
        known = {number: names.get(id(param), number) for number, param in zip(numbered, params, strict=True)}
        inf, nan = (tuple(known.get(name, name) for name in given) for given in (report.inf, report.nan))
        return replace(report, inf=inf, nan=nan, named=report.named or not {*inf, *nan} & {*numbered})

    def _try_to_write(self) -> None:
        """Write the file. If writing fails, for example because the disk is full, give a warning."""
        if self._writes:
            with only_warning(self._name, self._give_up):
                self.write()

    def write(self) -> None:
        """Write the report as it is now. The file is replaced atomically."""
        start = time.perf_counter()
        dtypes = {name: self._survey.dtype_of(name) for name in self._headroom.modules}
        text = render(self.history, self._headroom, dtypes, **self._facts())
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            # errors= is needed, because file names may contain bytes that are not UTF-8.
            unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
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
        """Return a sentence for each kind of step that the report cannot show completely."""
        texts = []
        if self._log.has_captured:
            skipped = f"The number of skipped steps, including replays, is {self._log.skipped_steps()}."
            texts.append(
                "Steps captured in a CUDA graph are not drawn, because replays do not run Python code. "
                f"{skipped}"
            )
        return texts


def report(scaler: Any, model: nn.Module, path: str | Path = "run.html") -> RunReport:
    """Write an HTML file about a run's numerics, and keep it up to date while the block is open.

    The file, called the run report, shows the loss scale, skipped steps, gradient norms and the loss. The
    report also shows the dtypes of the model, and how near each module's gradients come to the limits of
    their dtype. From the second skipped step on, the report names the module in which the first inf or nan
    arose. `amp-plugin diagnose` finds the op that produced the inf or nan, and the line of the op. The file
    opens in a browser without an internet connection.

    The host waits for the device after each optimizer step. Reading gradients takes at most 0.25 % of the
    run's time. The report does not change the training.

    Args:
        scaler: The object through which the program steps its optimizers, which is a GradScaler, a Fabric or
            Trainer plugin, or an AmpAccelerator. In bf16 and fp32, use a GradScaler with ``enabled=False``.
        model: The model that is trained. Its module names appear in the report.
        path: The path of the HTML file. If another run is writing to this file, the report takes the next
            free name, such as ``run-2.html``. Only rank 0 writes the file.

    Returns:
        A context manager, whose attribute ``path`` is the path of the HTML file.

    Raises:
        ImportError: A package of the pip extra ``report`` is not installed.

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
    """Return the first path to which no other run is writing, and lock it until ``stack`` is closed."""
    # ``amp-plugin diagnose`` repeats the user's run, and must not overwrite the report of that run.
    if is_watched():
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
    """Return the ``amp-plugin diagnose`` command that finds the op and the line at fault in this program."""
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
    """Write a run report about the program that runs inside the block.

    At the end, the path of the report is printed.

    The report shows the steps of an amp_plugin scaler, plugin or accelerator. If the program makes
    several scalers, plugins or accelerators, the report uses the last one made before the model is first
    called. If the program makes no scaler, plugin or accelerator, the report watches all optimizer steps,
    just before they are taken.
    """
    logs: list[weakref.ref[StepLog]] = []
    pages: list[RunReport] = []
    # This scaler is created before the program runs, so it is not mistaken for a scaler of the program.
    observer = GradScaler("cpu", enabled=False)

    def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
        observer.core.measure(optimizer)
        observer.core.note_step(optimizer)

    def begin(module: nn.Module, _: Any) -> None:
        """Begin the report when a module is first called in training mode."""
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
            print(f"amp-plugin: the run report of {program} is in {pages[0].path}", file=sys.stderr)
    if not pages:
        print(
            f"amp-plugin: no run report was written, because {program} called no model in training mode "
            "outside of compiled code; write `with amp_plugin.report(scaler, model, path):` around the "
            "training loop",
            file=sys.stderr,
        )
