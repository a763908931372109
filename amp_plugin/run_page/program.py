"""The page of a program that nobody edits: it follows the first model that is trained in it."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self

from amp_plugin.run_page.page import require_libraries
from amp_plugin.run_page.report import RunReport
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.step_log import StepLog, new_logs


class ProgramPage:
    """Draws the program that runs while the block is open.

    Its steps are those of the scaler, plugin or accelerator of this package that was made last before the
    model is first called; in a program without one, all steps of optimizers, before they are taken.
    """

    def __init__(self, path: str | Path) -> None:
        require_libraries()
        self._path = path
        self._open = ExitStack()
        self._logs: list[weakref.ref[StepLog]] = []
        self.page: RunReport | None = None
        self._is_compiled = False
        self._observer = GradScaler("cpu", enabled=False)  # made before the program: not one of its own

    def __enter__(self) -> Self:
        """Wait for a model."""
        hook = register_module_forward_pre_hook(self._begin)
        self._open.callback(hook.remove)
        self._open.enter_context(new_logs(lambda log: self._logs.append(weakref.ref(log))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the last page."""
        with self._open:
            if self.page is not None:
                self.page.__exit__(kind, error, traceback)

    def outcome(self) -> str:
        """Return what became of the page, said of the program."""
        if self.page is not None:
            return f"is drawn in {self.page.path}"
        if self._is_compiled:
            return (
                "trains a model that is called in compiled code only, where it cannot be followed: no page; "
                "write `with amp_plugin.report(scaler, model, path):` around the loop"
            )
        return "has called no model to be trained: no page"

    def _begin(self, module: nn.Module, _: Any) -> None:
        """Follow the first module that is called to be trained."""
        trained = module.training and torch.is_grad_enabled()
        if self.page is not None or not trained or not any(p.requires_grad for p in module.parameters()):
            return
        if is_compiling():
            self._is_compiled = True
            return
        logs = [log for reference in self._logs if (log := reference()) is not None]
        steps = _Steps(logs[-1]) if logs else self._observed()
        self.page = RunReport(steps, module, self._path, options=None, skips=bool(logs))
        self.page.__enter__()

    def _observed(self) -> GradScaler:
        """Return what follows the steps of a program that has nothing of this package."""
        observer = self._observer

        def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
            observer.measure(optimizer)
            observer.note_step(optimizer)

        self._open.callback(register_optimizer_step_pre_hook(before_step).remove)
        return observer


class _Steps:
    """The owner of a log that is known by it alone."""

    def __init__(self, step_log: StepLog) -> None:
        self.step_log = step_log
