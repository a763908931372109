"""How far a program has come: passes and optimizer steps, counted while a region is open."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When an op ran, by what can be counted from outside of the program. All counts begin with the region.

    Attributes:
        model: class of the outermost module that was called last; empty before the first call.
        forward_pass: how often this module has been called, that call included; in training or not.
        backward_pass: backward passes that have begun, those inside reentrant checkpoints included.
        optimizer_steps: steps that optimizers have finished, of all optimizers together. A step that a
            scaler skips before it reaches the optimizer is none.
        since_step: calls of that module since the last of them.
        in_backward: whether the op ran in the last backward pass.
    """

    model: str = ""
    forward_pass: int = 0
    backward_pass: int = 0
    optimizer_steps: int = 0
    since_step: int = 0
    in_backward: bool = False

    def __str__(self) -> str:
        step = f"optimizer step {self.optimizer_steps}"
        if self.optimizer_steps and self.model:
            return f"{self._passes()} ({self.since_step} since {step})"
        return f"{self._passes()}, " + (
            f"after {step}" if self.optimizer_steps else "before the end of the first optimizer step"
        )

    def _passes(self) -> str:
        forward = f"forward pass {self.forward_pass} of {self.model}" if self.model else ""
        backward = f"backward pass {self.backward_pass}"
        if self.in_backward:
            return f"{backward}, after {forward}" if forward else backward
        before = f"after {backward}" if self.backward_pass else "before the first forward pass of a module"
        return forward or before


class Progress:
    """Count passes and optimizer steps between open and close."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._called_at_step: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None
        self._last_task = -1
        self._backward_passes = 0
        self._steps = 0
        self._thread = 0
        self._hook: RemovableHandle | None = None

    def open(self) -> None:
        """Count the steps of all optimizers, and the passes of this thread, from now on."""
        self._thread = threading.get_ident()

        def count_step(*_: Any) -> None:
            self._steps += 1
            self._called_at_step.update(self._calls)

        count_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass
        self._hook = register_optimizer_step_post_hook(count_step)

    def close(self) -> None:
        """Count no more steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def called(self, model: nn.Module) -> None:
        """Count a call of an outermost module; what a backward pass computes again is none."""
        if threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1:
            self._calls[model] = self._calls.get(model, 0) + 1
            self._model = weakref.ref(model)

    def in_backward(self, task: int) -> None:
        """Count a backward pass by its first op.

        Args:
            task: autograd's number of the pass; a later pass has a larger one.
        """
        if task > self._last_task:
            self._last_task = task
            self._backward_passes += 1

    def now(self, *, in_backward: bool) -> Moment:
        """Return how far the program is.

        Args:
            in_backward: whether a backward pass runs.
        """
        model = self._model() if self._model is not None else None
        calls = 0 if model is None else self._calls[model]
        return Moment(
            model="" if model is None else type(model).__name__,
            forward_pass=calls,
            backward_pass=self._backward_passes,
            optimizer_steps=self._steps,
            since_step=0 if model is None else calls - self._called_at_step.get(model, 0),
            in_backward=in_backward,
        )
