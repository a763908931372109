"""Decide where a number that is not finite comes from: made here, read here, or put there on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from amp_plugin.numerics.op import Argument, Call, OpTraits
from amp_plugin.numerics.values import NonFinite, non_finite, real_values, storage_address

Verdict = Literal["made", "on purpose", "masked", "passed on"]

# Share of a dtype's largest number beyond which numbers are masks. Nobody computes with 1e38. In fp16
# activations and scaled gradients do get near 65504, so there it is the end of the range alone.
_MASKING, _MASKING_IN_FP16 = 0.25, 0.999
_KINDS = ("nan", "posinf", "neginf")


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTensor:
    """An argument as it was before the op ran."""

    argument: Argument  # which one
    held: NonFinite  # the numbers in it that are not finite
    # its real values then; None if they cannot be read, or were finite and are written since
    values: Tensor | None

    def finite(self) -> Tensor | None:
        """Return where it is finite, bool of its real values' shape; None if that cannot be read."""
        if self.values is None:
            return None
        finite = self.values.isfinite()
        if self.argument.tensor.is_complex():  # either part of a number spoils both of what is made of it
            finite = finite.all(-1, keepdim=True).expand_as(finite)
        return finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What became of one result."""

    # "made" from inputs that do not explain it; "on purpose": a constant of the caller; "masked": -inf from
    # numbers so large that only masks have them; "passed on" from an input
    verdict: Verdict
    values: NonFinite  # what it made, or what it passes on
    # the arguments that were not finite, those that explain the result first
    of: tuple[GivenTensor, ...] = ()


def given_before(call: Call) -> dict[str, GivenTensor]:
    """Read the arguments in memory that an op is going to write, by label; others can be read afterwards.

    ``addmm(c, a, b, out=c)`` writes what it reads, so ``self`` is read before as well.
    """
    arguments, traits, found = call.arguments, call.traits, {}
    written = {storage_address(argument.tensor) for argument in arguments if argument.name in traits.written}
    for argument in arguments:
        if argument.name in traits.written or storage_address(argument.tensor) in written - {0}:
            held = NonFinite() if argument.name in traits.overwritten else non_finite(argument.tensor)
            values = real_values(argument.tensor) if held else None
            values = None if values is None else values.clone()
            found[argument.label] = GivenTensor(argument=argument, held=held, values=values)
    return found


def given_after(argument: Argument) -> GivenTensor:
    """Read an argument that the op has not written."""
    tensor = argument.tensor
    return GivenTensor(argument=argument, held=non_finite(tensor), values=real_values(tensor))


def judge(
    result: Argument, given: Sequence[GivenTensor], traits: OpTraits, scalars: Sequence[float]
) -> Judgement:
    """Return where the numbers of one result that are not finite come from."""
    if traits.is_listwise and result.index is not None:
        given = [tensor for tensor in given if tensor.argument.index in {None, result.index}]
    values = non_finite(result.tensor)
    unfinite = sorted((tensor for tensor in given if tensor.held), key=lambda tensor: not tensor.held.nan)
    own: list[tuple[NonFinite, Tensor | None]] = [] if unfinite else [(values, None)]  # none from an input
    if unfinite and traits.is_pointwise and (new := _new_elements(result.tensor, unfinite)) is not None:
        own.append((non_finite(result.tensor, new), new))
    if unfinite and traits.moves:  # it did not find what no argument has
        brought = {name for name in _KINDS if any(getattr(tensor.held, name) for tensor in unfinite)}
        found = {name: getattr(values, name) and name not in brought for name in _KINDS}
        own.append((NonFinite(**found), None))
    for held, where in own:
        if held:
            computes = bool(given) and not traits.moves
            verdict = _of_finite(result.tensor, held, given, scalars, computes=computes, where=where)
            if verdict == "made" or not unfinite:
                return Judgement(verdict=verdict, values=held)
    if values.nan and not unfinite[0].held.nan and not any(map(math.isnan, scalars)):
        return Judgement(verdict="made", values=NonFinite(nan=True), of=tuple(unfinite))
    return Judgement(verdict="passed on", values=values, of=tuple(unfinite))


def _of_finite(
    result: Tensor,
    values: NonFinite,
    given: Sequence[GivenTensor],
    scalars: Sequence[float],
    *,
    computes: bool,
    where: Tensor | None,
) -> Verdict:
    """Judge a result none of whose numbers comes from an input."""
    if _are_constants(values, scalars, computes=computes):
        return "on purpose"
    is_masked = values.neginf and not (values.posinf or values.nan) and _is_masked(result, given, where)
    return "masked" if is_masked else "made"


def _are_constants(values: NonFinite, scalars: Sequence[float], *, computes: bool) -> bool:
    """Whether numbers are those that the caller gave; an op that computes may turn an infinity's sign."""
    if values.nan:
        return any(map(math.isnan, scalars))
    if computes:
        return any(map(math.isinf, scalars))
    return (not values.posinf or math.inf in scalars) and (not values.neginf or -math.inf in scalars)


def _is_masked(result: Tensor, given: Sequence[GivenTensor], where: Tensor | None) -> bool:
    """Whether each -inf stands where an input has a number from the end of its dtype's range."""
    values = real_values(result)
    if values is None:
        return False
    infinite = values == -math.inf
    if where is not None:
        infinite = infinite & where
    for tensor in given:
        if tensor.values is not None:
            largest = torch.finfo(tensor.argument.tensor.dtype).max
            huge = tensor.values <= -(_MASKING if largest > 1e38 else _MASKING_IN_FP16) * largest
            spread = _spread(huge, infinite)
            if spread is not None and bool((spread | ~infinite).all()):
                return True
    return False


def _new_elements(result: Tensor, unfinite: Sequence[GivenTensor]) -> Tensor | None:
    """Return where a pointwise result is not finite though every input is; None if that cannot be read."""
    values = real_values(result)
    if values is None:
        return None
    new = ~values.isfinite()
    for tensor in unfinite:
        finite = tensor.finite()
        spread = None if finite is None else _spread(finite, new)
        if spread is None:
            return None
        new = new & spread
    return new


def _spread(mask: Tensor, over: Tensor) -> Tensor | None:
    """Return an argument's mask over a result; None if their shapes have nothing to do with each other."""
    try:
        return mask.broadcast_to(over.shape)
    except RuntimeError:
        return None
