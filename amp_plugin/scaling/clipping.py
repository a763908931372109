"""Clip unscaled gradients, whatever unit they are in when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling import folding, stepping
from amp_plugin.scaling.distributed import combine
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.registry import OptimizerRecord
from amp_plugin.scaling.spread import parameter_spreads

if TYPE_CHECKING:
    from amp_plugin.scaling.optimizer_calls import OptimizerCalls

Target = Optimizer | Tensor | Iterable[Tensor]


def clip_norm(
    scaler: OptimizerCalls,
    target: Target,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    fold: bool = False,
) -> Tensor:
    """Clip the norm of unscaled gradients, as ``torch.nn.utils.clip_grad_norm_`` does.

    Unscales them first if need be, and may be called any number of times::

        norm = || unscaled gradients ||_p          (over all ranks, float32, one pass or none)
        gradients *= min(1, max_norm / (norm + 1e-6))          (nothing is written if that is 1)

    Overflowed gradients are left as they are: the step will be skipped.

    Args:
        scaler: The scaler.
        target: An optimizer, or parameters of optimizers the scaler knows.
        max_norm: Largest norm.
        norm_type: The p of the norm; ``inf``, ``-inf`` and 0 included.
        error_if_nonfinite: Raise if the norm is not finite: a host sync.
        fold: With a fused optimizer, hand the factor to its kernel instead of writing gradients: one
            read of them is all. For callers that do not look at ``.grad`` before ``step()``, where it
            is still scaled and not clipped. Ignored where the optimizer cannot.

    Returns:
        The norm before clipping, float32, 0-dim, no host sync.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not; or the parameters' optimizer is unknown.
        TypeError: An argument is something else.
        ValueError: ``max_norm`` is negative or nan.
    """
    max_norm, norm_type = _limit("max_norm", max_norm), _number("norm_type", norm_type)
    if not scaler.is_enabled():
        params = _params_of(target)
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        given = set(map(id, params))
        for optimizer in [target] if isinstance(target, Optimizer) else scaler.optimizers:
            if given == set(map(id, _params_of(optimizer))):
                scaler.note_norm(optimizer, norm)
        return norm
    if isinstance(target, Optimizer):
        record = scaler._record(target)
        norm, folded = _norm_of_record(scaler, record, norm_type, fold)
        sets = record.sets
    else:
        record, folded = None, False
        sets = [_own_set(scaler, target)]
        norm = _norm_of_sets(scaler, sets, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm).item():
        msg = (
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. "
            "With a loss scale this happens at times, the step is skipped: leave error_if_nonfinite=False."
        )
        raise RuntimeError(msg)
    if record is not None and folded:
        earlier = None if record.clip is None else record.clip.factor()
        record.clip = folding.FoldedClip(norm, max_norm, earlier)
        return norm
    factor = torch.ops.amp_plugin.clip_factor(norm, max_norm)
    for one in sets:
        one.clip_(factor, norm_type)
    return norm


def clip_value(scaler: OptimizerCalls, target: Target, clip_value: float) -> None:
    """Clip every element of unscaled gradients, as ``torch.nn.utils.clip_grad_value_`` does.

    Args:
        scaler: The scaler.
        target: An optimizer, or parameters of optimizers the scaler knows.
        clip_value: Largest absolute value; infinities are clipped too, the step is skipped all the same.

    Raises:
        TypeError: An argument is something else.
        ValueError: ``clip_value`` is negative or nan.
    """
    clip_value = _limit("clip_value", clip_value)
    params = _params_of(target)
    if scaler.is_enabled():
        for record in _records_of(scaler, target if isinstance(target, Optimizer) else params):
            _unscale(scaler, record)
    if any(param.grad is not None for param in params):  # torch's fails if there is none
        torch.nn.utils.clip_grad_value_(params, clip_value)


def _norm_of_record(
    scaler: OptimizerCalls, record: OptimizerRecord, norm_type: float, fold: bool
) -> tuple[Tensor, bool]:
    scaler._check_scale_growth_tracker("clip_grad_norm_")
    folded = fold and folding.foldable(record) is not None
    if not folded:
        return _unscale(scaler, record, norm_type), False
    norm, _ = stepping.check(scaler, record, write=False, norm_type=norm_type)
    return (norm if record.clip is None else norm * record.clip.factor()), True


def _unscale(scaler: OptimizerCalls, record: OptimizerRecord, norm_type: float = 2.0) -> Tensor:
    scaler._check_scale_growth_tracker("clip")
    norm, _ = stepping.check(scaler, record, write=True, norm_type=norm_type)
    record.stage = OptState.UNSCALED
    return norm


def _own_set(scaler: OptimizerCalls, target: Tensor | Iterable[Tensor]) -> GradientSet:
    """The given parameters as a set, their optimizers' gradients unscaled."""
    params = _params_of(target)
    for record in _records_of(scaler, params):
        _unscale(scaler, record)
    return GradientSet(params, frozenset())


def _norm_of_sets(scaler: OptimizerCalls, sets: list[GradientSet], norm_type: float) -> Tensor:
    parts = [part for one in sets for part in one.measure(norm_type)]
    spreads = parameter_spreads([param for one in sets for param in one.params])
    device = scaler._check_scale_growth_tracker("clip_grad_norm_")[0].device
    return combine(parts, norm_type, device, scaler._groups, spreads)[0]


def _limit(name: str, given: object) -> float:
    limit = _number(name, given)
    if not limit >= 0:
        msg = f"clip: {name}={given!r} is not allowed; give a number that is not negative"
        raise ValueError(msg)
    return limit


def _number(name: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        order = "; the optimizer or its parameters come first" if isinstance(given, Optimizer) else ""
        msg = f"clip: {name}={_short(given)} is not allowed; give a number{order}"
        raise TypeError(msg) from None


def _params_of(target: Target) -> list[Tensor]:
    if isinstance(target, Optimizer):
        return [param for group in target.param_groups for param in group["params"]]
    if isinstance(target, Tensor):
        return [target]
    given: object = target
    advice = ""
    if isinstance(target, torch.nn.Module):
        advice = ": give its parameters()"
    elif isinstance(target, Iterable):
        params = list(target)
        given = next((each for each in params if not isinstance(each, Tensor)), None)
        if given is None:
            return params
        advice = ": give parameters() instead of named_parameters()" if isinstance(given, tuple) else ""
    msg = f"clip: an optimizer or parameters are wanted, got {_short(given)}{advice}"
    raise TypeError(msg)


def _short(given: object) -> str:
    plain = given is None or isinstance(given, (str, int, float))
    return repr(given) if plain else type(given).__name__


def _records_of(scaler: OptimizerCalls, target: Optimizer | list[Tensor]) -> list[OptimizerRecord]:
    """The records of the optimizers that step the given parameters."""
    if isinstance(target, Optimizer):
        return [scaler._record(target)]
    params = _params_of(target)
    wanted = {id(param) for param in params}
    unknown = {id(param) for param in params if param.grad is not None}
    records = []
    for record in scaler._registry:
        scaler._registry.refresh(record)
        own = {id(param) for param in record.params}
        if own & wanted:  # also without gradients here: other ranks may have some, and wait for this one
            records.append(record)
        unknown -= own
    if unknown:
        msg = (
            f"clip: {len(unknown)} of the parameters belong to no optimizer this scaler knows, so the scale "
            "of their gradients is unknown; call scaler.register(optimizer) first, or pass the optimizer."
        )
        raise RuntimeError(msg)
    return records
