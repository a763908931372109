"""A program as what is tuned: its first backward passes, run again and again with the weights held still."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import Self

from amp_plugin.cli.program import Program
from amp_plugin.cli.program import run_program
from amp_plugin.tuning.workload import Observer


class Enough(BaseException):
    """The backward passes that were wanted have run."""


class Script:
    """A program whose backward passes are the batches.

    It starts anew for each set of rules, with the same seeds, and is ended after the last batch. Optimizers
    step, but their weights are put back, so that all batches see the same ones.

    Args:
        program: a file or a module.
        arguments: its arguments.
        batches: backward passes to run.
    """

    model: nn.Module | None = None

    def __init__(self, program: Program, arguments: Sequence[str], *, batches: int) -> None:
        self._program = program
        self._arguments = list(arguments)
        self._has_run = False
        self.batches = batches

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the program until its first backward passes are done; its output is dropped.

        Raises:
            RuntimeError: it ended before, by itself or by an error.
        """
        random.seed(0)
        torch.manual_seed(0)
        counted = _CountedBackwards(observer, batches)
        expected: tuple[type[BaseException], ...] = (Enough, Exception) if self._has_run else (Enough,)
        quiet = contextlib.redirect_stderr(io.StringIO()) if self._has_run else contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()), quiet:
            run = run_program(self._program, self._arguments, around=counted, expected=expected)
        if counted.count < batches:
            ended = "an error" if run.failed else f"exit code {run.code}"
            msg = (
                f"{self._program.name} ended with {ended} after {counted.count} backward passes, and "
                f"{batches} are wanted; it must run by itself, and train for as many batches"
            )
            raise RuntimeError(msg)
        self._has_run = True


class _CountedBackwards:
    """A region that tells an observer of each backward pass, and ends the program after the last."""

    def __init__(self, observer: Observer, wanted: int) -> None:
        self.count = 0
        self._observer = observer
        self._wanted = wanted
        self._names: dict[Tensor, str] = {}
        self._is_begun = False
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._opened.enter_context(_weights_held_still())
        for hook in (
            register_module_parameter_registration_hook(self._registered),
            register_module_forward_pre_hook(self._forward),
        ):
            self._opened.callback(hook.remove)
        self._opened.enter_context(_wrapped_backward(self._backward))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()
        self._names.clear()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            self._names.setdefault(param, f"{type(module).__name__}.{name} (number {len(self._names)})")

    def _forward(self, *_: Any) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._observer.begin()

    def _backward(self) -> None:
        gradients = {name: param.grad for param, name in self._names.items() if param.grad is not None}
        if not gradients:  # of losses that no module's parameter is in
            return
        self._observer.end(gradients)
        self.count, self._is_begun = self.count + 1, False
        if self.count >= self._wanted:
            raise Enough


@contextlib.contextmanager
def _weights_held_still() -> Iterator[None]:
    """Put back what each optimizer step changes in its parameters."""
    before: dict[Optimizer, list[Tensor]] = {}

    def parameters(optimizer: Optimizer) -> list[Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def keep(optimizer: Optimizer, *_: Any) -> None:
        before[optimizer] = [param.detach().clone() for param in parameters(optimizer)]

    def restore(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for param, value in zip(parameters(optimizer), before.pop(optimizer), strict=True):
                param.copy_(value)

    hooks = register_optimizer_step_pre_hook(keep), register_optimizer_step_post_hook(restore)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _wrapped_backward(done: Callable[[], None]) -> Iterator[None]:
    """Call a function after each backward pass of the program, those within one left out."""
    plain = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        is_inner = torch._C._current_graph_task_id() != -1
        plain(*args, **kwargs)
        if not is_inner:
            done()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain
