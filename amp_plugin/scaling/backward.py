"""What happens when a backward pass from a scaled loss begins: only such a pass makes scaled gradients.

Versions of tensors cannot tell a user's clipping from a backward that adds to a gradient;
a hook on the scaled output can. It runs before any gradient of that backward exists.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_plugin.scaling.loss_scale import PendingScale
from amp_plugin.scaling.per_optimizer import PerOptimizerState
from amp_plugin.scaling.registry import Registry


class Backwards:
    """The backward passes from scaled losses."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._task = -1

    def watch(self, output: Tensor, reading: PendingScale) -> None:
        """Learn when a backward from a scaled ``output`` begins.

        Under ``torch.compile`` and functorch transforms nothing is watched: new gradients that follow an
        ``update()`` are then taken for scaled ones, as torch does.
        """
        if not output.requires_grad or torch.compiler.is_compiling():
            return
        if torch._C._functorch.maybe_current_level() is not None:
            return
        output.register_hook(partial(_begin, weakref.ref(self), reading))  # type: ignore[no-untyped-call]

    def begin(self, reading: PendingScale) -> None:
        """Get all gradients ready for a backward from an output scaled by a loss scale."""
        loss_scale = reading.loss_scale
        task = torch._C._current_graph_task_id()
        last = self._registry.last_backward
        if last is not None and task == self._task:
            if last.loss_scale is not loss_scale:
                msg = (
                    "one backward() brings gradients of two losses with scales of their own, which cannot be "
                    "told apart: call backward() on each scaled loss, one after the other."
                )
                raise RuntimeError(msg)
            return
        self._task = task
        self._registry.refresh_joined()
        self._registry.note_backward(reading if reading.change() is None else loss_scale.read())
        # In this order: which states unscale again is known only before units change; clips are written
        # before gradients are added to; marks are set after converting.
        states = list(self._registry)
        carry_none = [state for state in states if any(g.carries is None for g in state.groups)]
        again = [state for state in carry_none if state.stage is OptState.UNSCALED]
        for state in states:
            state.write_clip()
        several_ranks = any(state.spans_ranks for state in states)
        for gradients in self._registry.groups():
            gradients.convert_for_backward_(loss_scale, several_ranks=several_ranks)
        for state in states:
            state.note_backward()
        if again:  # after the callbacks that DDP and FSDP queue in the backward, hence queued twice
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(partial(_unscale_again, again)))


def is_watched(output: object) -> bool:
    """Return whether something is a loss that was scaled."""
    hooks = getattr(output, "_backward_hooks", None) or {}
    return any(isinstance(hook, partial) and hook.func is _begin for hook in hooks.values())


def _begin(backwards: weakref.ref[Backwards], reading: PendingScale, grad: Tensor) -> Tensor | None:
    """Begin the backward; if the scale has changed since ``scale()``, correct what comes in."""
    owner = backwards()
    if owner is not None:
        owner.begin(reading)
    change = reading.change()
    return None if change is None else grad * change.to(device=grad.device, dtype=grad.dtype)


def _unscale_again(states: list[PerOptimizerState]) -> None:
    """After a backward in mid-window: what was unscaled before it is unscaled again."""
    for state in states:
        if state.stage is OptState.UNSCALED:
            state.check(write=True)
