"""The page of a program that nobody edits: it follows the first model that is trained in it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_plugin.run_page.report import RunReport
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.step_log import StepLog, new_logs


@contextmanager
def program_page(path: Path, program: str) -> Iterator[None]:
    """Draw the program that runs while the block is open, and print what became of the page.

    Its steps are those of the scaler, plugin or accelerator of this package that was made last before the
    model is first called; in a program without one, all steps of optimizers, before they are taken.
    """
    logs: list[weakref.ref[StepLog]] = []
    pages: list[RunReport] = []
    observer = GradScaler("cpu", enabled=False)  # made before the program: not one of its own

    def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
        observer.measure(optimizer)
        observer.note_step(optimizer)

    def begin(module: nn.Module, _: Any) -> None:
        """Follow the first module that is called to be trained."""
        trained = module.training and torch.is_grad_enabled() and not is_compiling()
        if pages or not trained or not any(param.requires_grad for param in module.parameters()):
            return
        made = [log for reference in logs if (log := reference()) is not None]
        if not made:
            opened.callback(register_optimizer_step_pre_hook(before_step).remove)
        steps: Any = SimpleNamespace(step_log=made[-1]) if made else observer
        pages.append(RunReport(steps, module, path, skips=bool(made)))
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
            f"amp-plugin: {program} has called no model to be trained, or in compiled code only: no page; "
            "write `with amp_plugin.report(scaler, model, path):` around the loop",
            file=sys.stderr,
        )
