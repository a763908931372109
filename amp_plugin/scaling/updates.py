"""Rescales gradients when a backward pass uses another loss scale, or when the loss scale changes.

Scaled gradients are multiplied by the ratio of the new loss scale to the old one.

Only a backward pass from a scaled loss produces scaled gradients. The version counter of a gradient does not
show whether a backward pass or a clip has changed it. Therefore a hook on the scaled loss records each
backward pass. The hook runs before the pass computes the gradient of any parameter.

``update()`` is a request. The scale changes once no optimizer still has to step with the old scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_plugin.options import between
from amp_plugin.scaling.core import ScalerCore
from amp_plugin.scaling.gradients import first_float16, multiply_
from amp_plugin.scaling.loss_scale import Change, LossScale
from amp_plugin.scaling.optimizer_state import OptimizerState

_NO_CHECK = "No inf checks were recorded prior to update: {why}"

_NO_STEP = (
    "a scaled loss has run backward(), and this scaler has stepped no optimizer since. Call {step} before "
    "update(), and not the optimizer's own step(), which takes the scaled gradients as they are. If several "
    "backward passes come before a step, call update() after the step only."
)

_NO_BACKWARD = (
    "no scaled loss has run backward() since the last update(). Call {backward} and {step} first. Call "
    "update() once per iteration, after the last step, and leave it out in an iteration without a step."
)

_TWO_SCALES = (
    "one backward() brings gradients of two losses with scales of their own, which cannot be "
    "told apart: call backward() on each scaled loss, one after the other."
)

_FLOAT16_WAITS = (
    "{call} would convert the float16 gradient of parameter {name!r} to another scale, which "
    "loses small ones: call it after step(), or clear the gradients with zero_grad()."
)


def watch(core: ScalerCore, output: Tensor, scale: LossScale) -> None:
    """Register a hook on a scaled loss to record its backward passes. Under functorch there is no hook."""
    if not output.requires_grad or torch._C._functorch.maybe_current_level() is not None:
        return
    hook = partial(_begin, weakref.ref(core), scale, scale.change_from_now_on())
    output.register_hook(hook)  # type: ignore[no-untyped-call]


def _begin(
    core: weakref.ref[ScalerCore], scale: LossScale, change_since: Change, grad: Tensor
) -> Tensor | None:
    """Record that a backward pass begins.

    If the scale has changed since ``scale()`` was called, multiply the gradient of the loss by the
    ratio of the new scale to the old.
    """
    if (known := core()) is not None:
        _begin_backward(known, scale)
    change = change_since()
    return None if change is None else grad * change.to(device=grad.device, dtype=grad.dtype)


def _begin_backward(core: ScalerCore, scale: LossScale) -> None:
    """Prepare the gradients of all optimizers for a backward pass from a loss multiplied by ``scale``."""
    task = torch._C._current_graph_task_id()
    if core.last_scale is not None and task == core.last_task:
        if core.last_scale is not scale:
            raise RuntimeError(_TWO_SCALES)
        return
    core.refresh_joined()
    core.note_backward(scale, task)
    again = [state for state in core if state.stage is OptState.UNSCALED and None in state.scales_carried()]
    for state in core:
        state.begin_backward(scale)
    # Queue the callback from another callback, so that it runs after the callbacks of DDP and FSDP.
    if again:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(partial(_unscale_again, again)))


def _unscale_again(states: list[OptimizerState]) -> None:
    """Unscale gradients again, because a backward pass has added to them since ``unscale_`` was called."""
    for state in states:
        if state.stage is OptState.UNSCALED:
            state.measure(unscale=True)


def request(core: ScalerCore) -> None:
    """Request an update of the loss scales, and apply it at once if no gradient depends on the old scale."""
    if not core.shared.has_checked:
        is_awaited = core.last_scale is not None and all(state.is_awaited for state in core)
        words = core.shared.words
        why = (_NO_STEP if is_awaited else _NO_BACKWARD).format(backward=words.backward, step=words.step)
        raise AssertionError(_NO_CHECK.format(why=why))
    core.shared.request_update()
    settle(core, force=False)


def settle(core: ScalerCore, *, force: bool) -> None:
    """Apply a requested update, unless gradients still depend on the old scale. ``force`` converts them."""
    if not core.shared.awaits_update or (not force and core.delays_update()):
        return
    joined = core.refresh_joined()
    if any(_float16_gradients(core, pending=True)) if force else joined and core.delays_update():
        return
    with _changing(core):
        for loss_scale in core.shared.used_scales():
            loss_scale.update_()
    core.log.read()


def set_scale(core: ScalerCore, new_scale: float | Tensor) -> None:
    """Set all loss scales at once, and multiply scaled gradients by the ratio of the new scale to the old."""
    value = _checked(new_scale)
    with set_by_hand(core, f"update({new_scale!r})"):
        core.shared.request_update()
        for loss_scale in core.shared.used_scales():
            loss_scale.fill_(value)


@contextmanager
def set_by_hand(core: ScalerCore, call: str) -> Iterator[None]:
    """If the block sets loss scales, multiply scaled gradients by the ratio of the new scale to the old.

    Raises:
        RuntimeError: A scaled gradient is float16. Rescaling a float16 gradient would lose small values.
    """
    for state, param in _float16_gradients(core):
        raise RuntimeError(_FLOAT16_WAITS.format(call=call, name=state.name_of(param)))
    with _changing(core):
        yield


@contextmanager
def _changing(core: ScalerCore) -> Iterator[None]:
    """If the block changes loss scales, multiply scaled gradients by the ratio of new scale to old scale.

    A gradient that several optimizers share is multiplied only once.
    """
    before = [(scale, scale.edition, scale.snapshot()) for scale in core.shared.used_scales()]
    yield
    core.shared.end_update()
    changed = {scale: value for scale, edition, value in before if scale.edition != edition}
    done: set[int] = set()
    for state in core if changed else ():
        for scale, params, _ in state.parts():
            if scale is not None and scale in changed:
                own = [param for param in params if param.grad is not None and id(param) not in done]
                if own:
                    state.ledger.write(partial(multiply_, own, scale.require() / changed[scale]))
                done.update(map(id, own))
    for scale, _, _ in before:
        scale.publish()


def _float16_gradients(core: ScalerCore, *, pending: bool = False) -> Iterator[tuple[OptimizerState, Tensor]]:
    """Yield parameters with scaled float16 gradients, each with the state of its optimizer.

    With ``pending``, skip optimizers that have no step due.
    """
    for state in core:
        for scale, params, _ in state.parts() if not pending or state.ledger.waits() else ():
            param = None if scale is None else first_float16(params)
            if param is not None:
                yield state, param


def is_watched(output: object) -> bool:
    """Return whether an object is a scaled loss that has our hook."""
    hooks = getattr(output, "_backward_hooks", None) or {}
    return any(isinstance(hook, partial) and hook.func is _begin for hook in hooks.values())


def _checked(new_scale: float | Tensor) -> float | Tensor:
    if not isinstance(new_scale, Tensor):
        return between("new_scale", new_scale, 0)
    if new_scale.numel() != 1 or not new_scale.is_floating_point():
        msg = (
            f"new_scale must be a number or a floating tensor of one element, got "
            f"{tuple(new_scale.shape)} of {new_scale.dtype}"
        )
        raise ValueError(msg)
    return new_scale
