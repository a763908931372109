"""Why a program does not learn though all is finite: no step, lost updates, gradients that underflow."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.modules import follow_steps
from amp_plugin.numerics.op import Call, results_of
from amp_plugin.numerics.places import CalledFrom, called_from
from amp_plugin.numerics.report import Reporter
from amp_plugin.numerics.values import PLAIN, is_low_precision, unwatched

_ENOUGH = 3  # steps or backward passes, before their lack says something
_LOST = 0.5  # share of elements that steps did not move
_UNDERFLOWED = 0.25  # share of the elements of fp16 gradients that are 0 for their range alone
_MOVED_APART = (
    "store the weights exactly: fp32 weights under autocast, amp_plugin.store_weights(model, optimizer), "
)


@dataclass(kw_only=True, slots=True)
class _Share:
    """How many elements of how many were lost."""

    lost: int = 0
    elements: int = 0

    def add(self, lost: int, elements: int) -> None:
        self.lost, self.elements = self.lost + lost, self.elements + elements

    @property
    def value(self) -> float:
        return self.lost / self.elements if self.elements else 0.0


class Learning:
    """Count what steps and backward passes lose.

    Args:
        reporter: describes.
        state_written: called after each step with the optimizer's class and the state of each parameter.
    """

    def __init__(self, reporter: Reporter, state_written: Callable[[str, dict[str, object]], None]) -> None:
        self._reporter, self._state_written = reporter, state_written
        self._hooks: list[RemovableHandle] = []
        self._before: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._updates, self._underflow = _Share(), _Share()
        self._worst: tuple[float, str] = (0.0, "")
        self._steps = self._steps_with_gradients = 0
        self._leaves: set[int] = set()  # ids of parameters that got a gradient, while none has stepped
        self._has_optimizer: bool | None = None  # of one of them; looked for once
        self._dtype = torch.bfloat16
        self._stepped_at = CalledFrom()

    def open(self) -> None:
        """Follow the steps of all optimizers."""
        self._hooks = follow_steps(self._begin, self._end)

    def close(self) -> None:
        """Follow no more steps."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, optimizer: Optimizer) -> None:
        with unwatched():
            self._before[optimizer] = [
                (param, param.detach().clone())
                for group, param in _parameters(optimizer)
                if _rounds(param, optimizer) and float(group.get("lr", 1.0)) > 0
            ]

    def _end(self, optimizer: Optimizer) -> None:
        self._steps += 1
        self._steps_with_gradients += any(param.grad is not None for _, param in _parameters(optimizer))
        self._stepped_at = called_from()
        with unwatched():
            for param, before in self._before.pop(optimizer, []):
                wanted = param.grad != 0 if param.grad is not None else torch.zeros(())
                lost = int((wanted & (param == before)).sum()) if param.grad is not None else 0
                self._updates.add(lost, int(wanted.sum()))
                self._dtype = param.dtype
            name = type(optimizer).__name__
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    self._state_written(name, state)

    def after(self, call: Call, output: Any) -> None:
        """Count the elements of an fp16 gradient that are 0 and are not in fp32, of the same arguments."""
        if not call.is_backward:
            return
        if self._has_optimizer is None and not self._steps:
            self._look_for_an_optimizer(call)
        if call.traits.is_view or call.traits.written or call.traits.is_random:
            return
        results = [
            r.tensor
            for r in results_of(output)
            if r.tensor.dtype is torch.float16 and type(r.tensor) in PLAIN
        ]
        if not results or not any(bool((tensor == 0).any()) for tensor in results):
            return
        try:
            exact = results_of(call.func(*_wide(call.args), **_wide(call.kwargs)))
        except (RuntimeError, TypeError, NotImplementedError):
            return
        for tensor, other in zip(results, exact, strict=False):
            if other.tensor.shape == tensor.shape:
                lost = int(((tensor == 0) & (other.tensor != 0)).sum())
                self._underflow.add(lost, int((other.tensor != 0).sum()))
                share = lost / max(tensor.numel(), 1)
                if share > self._worst[0]:
                    self._worst = (share, call.here())

    def _look_for_an_optimizer(self, call: Call) -> None:
        """Find out in a late pass whether there is an optimizer that should have taken a step."""
        if call.accumulates:
            self._leaves.add(id(call.leaf))
        if self._reporter.progress.backward_passes >= _ENOUGH:
            optimizers = [held for held in gc.get_objects() if issubclass(type(held), Optimizer)]
            stepped = {id(param) for optimizer in optimizers for _, param in _parameters(optimizer)}
            self._has_optimizer = bool(stepped & self._leaves)

    def findings(self) -> Iterator[Finding]:
        """Yield why nothing is learnt, if there is a reason."""
        passes = self._reporter.progress.backward_passes
        if self._steps == 0 and self._has_optimizer:
            yield self._reporter.lesson(
                f"no optimizer took a step in {passes} backward passes",
                "call optimizer.step() after the backward pass; a scaler's step() leaves it out while "
                "gradients "
                "overflow.",
                cause="no step",
            )
        elif self._steps >= _ENOUGH and not self._steps_with_gradients:
            yield self._lesson(
                f"no parameter had a gradient in any of {self._steps} optimizer steps",
                "give the optimizer the parameters of the model that the loss is computed with, after "
                "the model was "
                "moved or replaced; look for detach() and no_grad() on the way to the loss.",
                "no step",
            )
        elif self._steps >= _ENOUGH and self._updates.value > _LOST:
            name = str(self._dtype).removeprefix("torch.")
            yield self._lesson(
                f"{self._updates.value:.0%} of the elements with a gradient did not move in {self._steps} "
                "steps: the "
                f"updates are below half a unit of {name} weights",
                f"{_MOVED_APART}AmpPrecision(weights='bf16') or stochastic rounding.",
                "lost updates",
            )
        elif passes >= _ENOUGH and self._underflow.value > _UNDERFLOWED:
            yield self._lesson(
                f"{self._underflow.value:.0%} of the fp16 gradients' elements are 0 and would not be in "
                "fp32, most of "
                f"them in {self._worst[1]}",
                "scale the loss: GradScaler, whose scale is found by itself, or bf16.",
                "underflow",
            )

    def _lesson(self, text: str, advice: str, cause: str) -> Finding:
        at = self._stepped_at
        return self._reporter.lesson(text, advice, cause=cause, place=at.place, caller=at.caller)


def _parameters(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    return ((group, param) for group in optimizer.param_groups for param in group["params"])


def _rounds(param: Tensor, optimizer: Optimizer) -> bool:
    """Return whether a step rounds a parameter to 16 bits and keeps nothing of what it rounds away."""
    if param.grad is None or not is_low_precision(param.dtype) or type(param) not in PLAIN:
        return False
    is_stochastic = bool(getattr(optimizer, "bf16_stochastic_round", False))
    return not is_stochastic and not hasattr(param, "_amp_plugin_stored")


def _wide(values: Any) -> Any:
    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and type(value) in PLAIN and value.dtype is torch.float16:
            return value.float()
        return torch.float32 if value is torch.float16 else value

    return tree_map(widened, values)
