"""What is tuned: a few batches, forward and backward, run again and again from the same state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_plugin.tuning.reference import Gradients


class Observer(Protocol):
    """Is told of each batch while a workload runs."""

    def begin(self) -> None:
        """A batch begins."""

    def end(self, gradients: Gradients) -> None:
        """A batch has run; its gradients are there until this returns."""


class NoObserver:
    """Looks at no batch."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self, gradients: Gradients) -> None:
        """Do nothing."""


class Workload(Protocol):
    """Batches that can be run as often as wanted, with the same numbers each time."""

    @property
    def batches(self) -> int:
        """The number of batches."""

    @property
    def model(self) -> nn.Module | None:
        """The model that gives ops their module names, if there is one."""

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the first batches, telling an observer of each."""


class Steps:
    """A step function on batches.

    Args:
        step: runs forward and backward on a batch, in an autocast region without rules of its own; it leaves
            the optimizer out.
        model: whose gradients are compared.
        batches: what ``step`` takes.

    Raises:
        ValueError: there is no batch, or no parameter wants a gradient.
    """

    def __init__(self, step: Callable[[Any], object], model: nn.Module, batches: Sequence[Any]) -> None:
        self._step = step
        self.model: nn.Module = model
        self._batches = list(batches)
        if not self._batches:
            msg = "tune(batches=[]): give at least one batch; two or three tell more"
            raise ValueError(msg)
        if not any(param.requires_grad for param in model.parameters()):
            msg = (
                "tune(model=...): no parameter of the model requires a gradient, so there is none to compare"
            )
            raise ValueError(msg)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def run(self, observer: Observer, *, batches: int) -> None:
        """Run the first batches from the state that the model and the generators have now."""
        with _state_kept(self.model), _gradients_kept(self.model):
            versions = {name: param._version for name, param in self.model.named_parameters()}
            for batch in self._batches[:batches]:
                self.model.zero_grad(set_to_none=True)
                observer.begin()
                self._step(batch)
                observer.end(self._gradients(versions))

    def _gradients(self, versions: dict[str, int]) -> dict[str, Tensor]:
        params = dict(self.model.named_parameters())
        changed = [name for name, param in params.items() if param._version != versions[name]]
        if changed:
            msg = f"the step changed the weight {changed[0]}; leave optimizer.step() out of what tune runs"
            raise ValueError(msg)
        gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
        if not gradients:
            msg = "the step gave no parameter a gradient; it has to call backward()"
            raise ValueError(msg)
        return gradients


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers and random generators back as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    python = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Put the gradients back that were there before."""
    gradients = {param: param.grad for param in model.parameters()}
    try:
        yield
    finally:
        for param, gradient in gradients.items():
            param.grad = gradient
