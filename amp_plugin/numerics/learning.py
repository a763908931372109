"""Find out why a model does not learn although all numbers are finite.

Three reasons are checked. The reasons are a missing optimizer step, updates that are lost to rounding in the
dtype of the weights, and gradients that underflow.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call
from amp_plugin.numerics.places import Place, Site, called_from
from amp_plugin.numerics.values import PLAIN, ShadowValues, Storages, is_low_precision
from amp_plugin.precision import short_name
from amp_plugin.scaling.gradients import params_of

_ENOUGH = 3  # failure to learn is reported only after this many steps or backward passes
_LOST = 0.5  # lost updates are reported if more than this fraction of the elements did not change
# Underflow is reported if more than this fraction of the gradient elements is 0 in fp16 but not in fp32.
_UNDERFLOWED = 0.25

_WIDE = ShadowValues(torch.float32)

# For each reason why a model may fail to learn, a description of the measurement and some advice.
_REASONS = {
    "no step": (
        "no optimizer took a step in {passes} backward passes",
        "call optimizer.step() after each backward pass. scaler.step(optimizer) skips it at an overflow.",
    ),
    "no step, no gradients": (
        "no parameter had a gradient in any of {steps} optimizer steps",
        (
            "give the optimizer the parameters that the loss depends on, and look for detach(), no_grad(), "
            "item() and torch.tensor() on the way to the loss, which cut off gradients."
        ),
    ),
    "lost updates": (
        (
            "in {steps} steps, {updates:.0%} of the elements with a gradient did not change, because their "
            "updates are lost to rounding in {dtype}"
        ),
        (
            "keep the weights in fp32 under autocast, or call store_weights(model, optimizer), which keeps "
            "the bits that 16-bit weights lose."
        ),
    ),
    "underflow": (
        "{underflow:.0%} of the elements of fp16 gradients are 0, but would not be 0 in fp32",
        "scale the loss with a GradScaler, which finds the scale by itself, or use bf16.",
    ),
}


class Learning:
    """Counts the elements whose update or gradient is lost to rounding."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._before: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._updates, self._underflow = [0, 0], [0, 0]  # (number of lost elements, total number of elements)
        self._steps_with_gradients = 0
        self._leaves: set[int] = set()  # the ids of parameters that received a gradient before the first step
        self._has_optimizer: bool | None = None  # whether an optimizer has a parameter that got a gradient
        self._dtype = torch.bfloat16
        self._stepped_at: tuple[Place | None, Place | None] = (None, None)
        self._new: Storages[Site] = Storages()  # the call to torch.tensor() that made the storage
        # Among all torch.tensor() calls, the one whose result was the first to receive a gradient.
        self._new_leaf: Site | None = None

    def step_begins(self, optimizer: Optimizer) -> None:
        """Copy the parameters whose updates may be lost to rounding."""
        self._before[optimizer] = [
            (param, param.detach().clone())
            for group in optimizer.param_groups
            if float(group.get("lr", 1.0)) > 0
            for param in group["params"]
            if _rounds(param, optimizer)
        ]

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count the elements that the step did not change although their gradient is not 0."""
        self._steps_with_gradients += any(param.grad is not None for param in params_of(optimizer))
        self._stepped_at = called_from()
        for param, before in self._before.pop(optimizer, []):
            if param.grad is not None:
                wanted = param.grad != 0
                _add(self._updates, wanted & (param == before), wanted)
                self._dtype = param.dtype

    def after(self, call: Call, output: Any) -> None:
        """Count the elements of an fp16 gradient that are 0, but would not be 0 in fp32."""
        if call.traits.base == "lift_fresh":
            self._new.set(output, call.site)
        if not call.is_backward:
            return
        if call.leaf is not None:
            self._new_leaf = self._new_leaf or self._new.get(call.leaf)
        if self._has_optimizer is None and not self._tracker.steps:
            self._leaves.add(id(call.leaf))
            if self._tracker.backward_passes >= _ENOUGH:
                optimizers = [held for held in gc.get_objects() if issubclass(type(held), Optimizer)]
                stepped = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
                self._has_optimizer = bool(stepped & self._leaves)
        traits, results = call.traits, [made.tensor for made in call.made(output)]
        if traits.is_view or not call.is_repeatable or not any(map(_has_zeros, results)):
            return
        if traits.written:  # an op that has overwritten an input cannot run again
            call.count_unmeasured()
            return
        exact = call.again(call.changed(_WIDE.plain, torch.float32), results) or ()
        for tensor, other in zip(results, exact, strict=False):
            if _has_zeros(tensor):
                _add(self._underflow, (tensor == 0) & (other != 0), other != 0)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding if the measurements show why the model fails to learn."""
        passes, steps, at = self._tracker.backward_passes, self._tracker.steps, self._stepped_at
        updates, underflow = (lost / max(of, 1) for lost, of in (self._updates, self._underflow))
        reason = ""
        if steps == 0 and self._has_optimizer:
            reason = "no step"
        elif steps >= _ENOUGH and not self._steps_with_gradients:
            reason = "no step, no gradients"
            if self._new_leaf is not None:
                at = self._new_leaf.place, self._new_leaf.caller
        elif steps >= _ENOUGH and updates > _LOST:
            reason = "lost updates"
        elif passes >= _ENOUGH and underflow > _UNDERFLOWED:
            reason = "underflow"
        if reason:
            lesson, advice = _REASONS[reason]
            shares = {"updates": updates, "underflow": underflow, "dtype": short_name(self._dtype)}
            yield Finding(
                kind="learning",
                cause=reason.partition(",")[0],
                lesson=lesson.format(passes=passes, steps=steps, **shares),
                advice=advice,
                place=at[0],
                caller=at[1],
                when=self._tracker.now(),
            )


def _add(share: list[int], lost: Tensor, elements: Tensor) -> None:
    share[0] += int(lost.sum())
    share[1] += int(elements.sum())


def _rounds(param: Tensor, optimizer: Optimizer) -> bool:
    """Return whether a step rounds a parameter to 16 bits without keeping the rounded-off bits."""
    if param.grad is None or not is_low_precision(param.dtype) or type(param) not in PLAIN:
        return False
    is_stochastic = bool(getattr(optimizer, "bf16_stochastic_round", False))
    return not is_stochastic and not hasattr(param, "_amp_plugin_stored")


def _has_zeros(tensor: Tensor) -> bool:
    is_fp16 = tensor.dtype is torch.float16 and type(tensor) in PLAIN
    return is_fp16 and bool((tensor == 0).any())
