"""Handles the user's hooks, backward calls, closures, weight averages and schedulers in a Trainer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.scaler import GradientOrigins
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.step_log import StepLog
from amp_plugin.weights.store import convert_to_fp32, in_fp32

_HOOK: Final = "on_before_optimizer_step"
_OF_MODULES: Final = ("configure_gradient_clipping", "clip_gradients", "optimizer_step", _HOOK)
_OF_PLUGINS: Final = {
    *("_after_closure", "_clip_gradients", "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"),
    *("main_params", "optimizer_step"),
}
NOT_AFTER_CLIPPING: Final = frozenset({"optimizer_step", _HOOK})
"""Methods that may be overridden without user code running between Lightning's clipping and the step."""
# A frequency so large that the Trainer never steps the scheduler.
_NEVER: Final = sys.maxsize


def users_methods(module: Any, plugin: object, is_overridden: Callable[[str, Any], bool]) -> frozenset[str]:
    """Return the names of overridden methods that run around an optimizer step and may read gradients."""
    kind = type(plugin)
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("amp_plugin."))
    of_module = {method for method in _OF_MODULES if is_overridden(method, module)}
    callbacks = {_HOOK for callback in module.trainer.callbacks if is_overridden(_HOOK, callback)}
    of_class = {method for method in _OF_PLUGINS if getattr(kind, method) is not getattr(ours, method)}
    return frozenset(of_module | callbacks | of_class | vars(plugin).keys() & _OF_PLUGINS)


def refuse_strays(origins: GradientOrigins, optimizer: Optimizer, scaler: Any) -> None:
    """Raise RuntimeError if an optimizer has gradients that ``self.manual_backward()`` did not compute.

    Gradients from a plain ``loss.backward()`` belong to an unscaled loss.
    """
    never_scaled = not scaler.core.has_scaled

    def is_stray(param: Tensor) -> bool:
        return origins.is_from_outside(param) or (never_scaled and param.grad is not None)

    strays = [place for place, param in enumerate(params_of(optimizer)) if is_stray(param)]
    if strays:
        named = ", ".join(scaler.core.state(optimizer).parameter_names()[place] for place in strays[:3])
        msg = (
            f"{type(optimizer).__name__}.step(): {len(strays)} parameters ({named}) have gradients that "
            "self.manual_backward() did not make. Their loss was not scaled, so fp16 has lost small "
            "gradients. Write self.manual_backward(loss) instead of loss.backward()"
        )
        raise RuntimeError(msg)


@cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def calls_closure_again(optimizer: Optimizer) -> bool:
    """Return True if an optimizer may call its closure more than once, or after changing the weights.

    The result is True for optimizers that require a closure, such as LBFGS, and for optimizers with the
    attribute ``calls_closure_again = True``, such as SAM. All other optimizers call the closure once, at the
    start of ``step()``, so the closure can also run before ``step()``.
    """
    kind: Any = type(optimizer)
    declared = getattr(optimizer, "calls_closure_again", None)
    return bool(_needs_closure(kind) if declared is None else declared)


def averages_in_fp32(callbacks: Iterable[Any], package: Any, undo: ExitStack) -> None:
    """Show a float32 model to callbacks that average weights (EMA, SWA).

    Closing the exit stack ``undo`` restores the callbacks.

    Averages that were created before the model's weights were set up are also converted to float32.
    """
    kinds = (package.callbacks.WeightAveraging, package.callbacks.StochasticWeightAveraging)
    hooks = [name for name in dir(package.Callback) if name.startswith(("on_train_", "on_validation_"))]
    for callback in (callback for callback in callbacks if isinstance(callback, kinds)):
        for name in hooks:
            if getattr(type(callback), name) is not getattr(package.Callback, name):
                setattr(callback, name, partial(_with_model_in_fp32, getattr(callback, name)))
                undo.callback(vars(callback).pop, name, None)
        average = getattr(callback, "_average_model", None)
        if isinstance(average, nn.Module):
            convert_to_fp32(average)


def _with_model_in_fp32(hook: Callable[..., Any], trainer: Any, module: nn.Module, *args: Any) -> Any:
    with in_fp32(module):
        return hook(trainer, module, *args)


def _after_landed_steps(should_update: Callable[..., bool], landed: Callable[[], int]) -> Callable[..., bool]:
    """Make ``should_update`` return False if every optimizer step since the last call was skipped.

    Lightning counts a skipped step like any other, so by itself it would average unchanged weights.

    Args:
        should_update: the callback's own method ``should_update``.
        landed: a function that returns the number of optimizer steps so far, without skipped steps.
    """
    seen = landed()

    def answer(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average the weights now. ``step_idx`` is None at the end of an epoch."""
        nonlocal seen
        if step_idx is not None:
            before, seen = seen, landed()
            if seen == before:
                return False
        return bool(should_update(step_idx=step_idx, epoch_idx=epoch_idx))

    return answer


def average_landed_steps(
    callbacks: Iterable[Any], package: Any, landed: Callable[[], int], undo: ExitStack
) -> None:
    """Make Lightning's weight averages (EMA) ignore skipped steps.

    Closing the exit stack ``undo`` restores the callbacks.
    """
    for callback in callbacks:
        if isinstance(callback, package.callbacks.WeightAveraging):
            callback.should_update = _after_landed_steps(callback.should_update, landed)
            undo.callback(vars(callback).pop, "should_update", None)


Scheduled = tuple[Any, int]
"""An LRSchedulerConfig of the Trainer, and its own frequency.

The Trainer steps a scheduler if ``(batch_idx + 1) % config.frequency == 0``. A frequency that is larger than
any batch index holds the scheduler back. The scheduler itself is not changed, because its ``state_dict()`` is
saved in checkpoints.
"""


def scheduled_after_steps(configs: Iterable[Any], log: StepLog) -> list[Scheduled]:
    """Return the configs of the schedulers that the Trainer steps after optimizer steps."""
    scheduled = [
        (config, config.frequency)
        for config in configs
        if config.interval == "step" and not config.reduce_on_plateau
    ]
    for config, frequency in scheduled:
        # With a frequency other than 1, the host must know a step's result before the scheduler steps.
        if frequency != 1:
            log.wait_for(config.scheduler.optimizer)
    return scheduled


def hold_schedulers(scheduled: Iterable[Scheduled], optimizer: Optimizer, log: StepLog) -> None:
    """Hold back the schedulers of an optimizer if its last step was skipped, else release them."""
    for config, frequency in scheduled:
        if config.scheduler.optimizer is optimizer:
            config.frequency = _NEVER if log.holds_schedulers(optimizer) else frequency


def release_schedulers(scheduled: Iterable[Scheduled]) -> None:
    """Release all schedulers."""
    for config, frequency in scheduled:
        config.frequency = frequency
