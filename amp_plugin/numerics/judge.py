"""Decide where a number that is not finite comes from: made here, read here, or put there on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from amp_plugin.numerics.op import Argument, OpTraits
from amp_plugin.numerics.values import FINITE, NonFinite, non_finite, real_values, storage_address

Verdict = Literal["made", "on purpose", "masked", "passed on"]

# Share of a dtype's largest number beyond which numbers are masks. Nobody computes with 1e38. In fp16
# activations and scaled gradients do get near 65504, so there it is the end of the range alone.
_MASKING, _MASKING_IN_FP16 = 0.25, 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTensor:
    """An argument as it was before the op ran.

    Attributes:
        argument: which one.
        held: the numbers in it that are not finite.
        finite: where it is finite, bool of its shape; None if everywhere, or if it can be read now as well.
        was_written: the op has written into its memory since.
    """

    argument: Argument
    held: NonFinite = FINITE
    finite: Tensor | None = None
    was_written: bool = False

    def is_finite_there(self) -> Tensor | None:
        """Return where it is finite, bool of its shape; None if that cannot be read."""
        if self.finite is not None:
            return self.finite
        values = real_values(self.argument.tensor)
        if values is None or self.was_written:
            return None
        finite = values.isfinite()
        if (
            self.argument.tensor.is_complex()
        ):  # either part of a number spoils both parts of what is made of it
            finite = finite.all(-1, keepdim=True).expand_as(finite)
        return finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What became of one result.

    Attributes:
        verdict: ``"made"`` from inputs that do not explain it; ``"on purpose"``: a constant of the caller;
            ``"masked"``: -inf from numbers so large that only masks have them; ``"passed on"`` from an input.
        values: what it made, or what it passes on.
        of: the arguments that were not finite, those that explain the result first.
    """

    verdict: Verdict
    values: NonFinite
    of: tuple[GivenTensor, ...] = field(default=())


def given_before(arguments: Sequence[Argument], traits: OpTraits) -> list[GivenTensor]:
    """Read the arguments in memory that the op is going to write; the others can be read afterwards.

    ``addmm(c, a, b, out=c)`` writes what it reads, so ``self`` is read before as well.
    """
    written = {storage_address(argument.tensor) for argument in arguments if argument.name in traits.written}
    found = []
    for argument in arguments:
        if argument.name in traits.written or storage_address(argument.tensor) in written - {0}:
            held = FINITE if argument.name in traits.overwritten else non_finite(argument.tensor)
            values = real_values(argument.tensor) if held else None
            finite = None if values is None else values.isfinite()
            found.append(GivenTensor(argument=argument, held=held, finite=finite, was_written=True))
    return found


def related(result: Argument, given: Sequence[GivenTensor], traits: OpTraits) -> list[GivenTensor]:
    """Return the arguments a result depends on: in ops on lists those in the same place."""
    if not traits.is_listwise or result.index is None:
        return list(given)
    return [tensor for tensor in given if tensor.argument.index in {None, result.index}]


def judge(
    result: Argument, given: Sequence[GivenTensor], traits: OpTraits, scalars: Sequence[float]
) -> Judgement:
    """Return where the numbers of one result that are not finite come from.

    Args:
        result: a result that is not finite.
        given: the arguments it depends on, as they were before the op.
        traits: of the op.
        scalars: Python floats among the arguments.
    """
    values = non_finite(result.tensor)
    computes = bool(given) and not traits.moves
    unfinite = [tensor for tensor in given if tensor.held]
    if not unfinite:
        return _of_finite(result.tensor, values, given, scalars, computes=computes)
    of_nan = [tensor for tensor in unfinite if tensor.held.nan]
    ordered = (*of_nan, *(tensor for tensor in unfinite if not tensor.held.nan))
    if traits.is_pointwise and (new := _new_elements(result.tensor, given)) is not None and bool(new.any()):
        own = _held(result.tensor, new)
        found = _of_finite(result.tensor, own, given, scalars, computes=computes, where=new)
        if found.verdict == "made":
            return found
    if traits.moves and (own := _infinities_of_a_new_sign(values, unfinite)):
        found = _of_finite(result.tensor, own, given, scalars, computes=False)
        if found.verdict == "made":
            return found
    if values.nan and not of_nan and not _has(scalars, nan=True):
        return Judgement(verdict="made", values=NonFinite(nan=True), of=ordered)
    return Judgement(verdict="passed on", values=values, of=ordered)


def _of_finite(
    result: Tensor,
    values: NonFinite,
    given: Sequence[GivenTensor],
    scalars: Sequence[float],
    *,
    computes: bool,
    where: Tensor | None = None,
) -> Judgement:
    """Judge a result none of whose numbers comes from an input."""
    if _are_constants(values, scalars, computes=computes):
        return Judgement(verdict="on purpose", values=values)
    if values.neginf and not values.posinf and not values.nan and _is_masked(result, given, where):
        return Judgement(verdict="masked", values=values)
    return Judgement(verdict="made", values=values)


def _are_constants(values: NonFinite, scalars: Sequence[float], *, computes: bool) -> bool:
    """Whether numbers are those that the caller gave; an op that computes may turn an infinity's sign."""
    if values.nan:
        return _has(scalars, nan=True)
    if computes:
        return _has(scalars, nan=False)
    return (not values.posinf or math.inf in scalars) and (not values.neginf or -math.inf in scalars)


def _infinities_of_a_new_sign(values: NonFinite, given: Sequence[GivenTensor]) -> NonFinite:
    """Return the infinities of a sign that no argument has: an op that moves elements did not find them."""
    return NonFinite(
        posinf=values.posinf and not any(tensor.held.posinf for tensor in given),
        neginf=values.neginf and not any(tensor.held.neginf for tensor in given),
    )


def _has(scalars: Sequence[float], *, nan: bool) -> bool:
    return any(math.isnan(scalar) if nan else math.isinf(scalar) for scalar in scalars)


def _is_masked(result: Tensor, given: Sequence[GivenTensor], where: Tensor | None) -> bool:
    """Whether each -inf stands where an input has a number from the end of its dtype's range."""
    infinite, values = _neginf(result), None
    if infinite is None:
        return False
    if where is not None:
        infinite = infinite & where
    for tensor in given:
        if tensor.was_written or (values := real_values(tensor.argument.tensor)) is None:
            continue
        largest = torch.finfo(tensor.argument.tensor.dtype).max
        huge = values <= -(_MASKING if largest > 1e38 else _MASKING_IN_FP16) * largest
        try:
            if bool((huge.broadcast_to(infinite.shape) | ~infinite).all()):
                return True
        except RuntimeError:  # shapes that have nothing to do with each other
            continue
    return False


def _neginf(result: Tensor) -> Tensor | None:
    values = real_values(result)
    return None if values is None else values == -math.inf


def _new_elements(result: Tensor, given: Sequence[GivenTensor]) -> Tensor | None:
    """Return where a pointwise result is not finite though every input is; None if that cannot be read."""
    values = real_values(result)
    if values is None:
        return None
    new = ~values.isfinite()
    for tensor in given:
        if not tensor.held:
            continue
        finite = tensor.is_finite_there()
        if finite is None:
            return None
        try:
            new = new & finite
        except RuntimeError:  # shapes that have nothing to do with each other
            return None
        if new.shape != values.shape:
            return None
    return new


def _held(result: Tensor, where: Tensor) -> NonFinite:
    values = real_values(result)
    if values is None:
        return FINITE
    chosen = values[where]
    return NonFinite(
        nan=bool(chosen.isnan().any()),
        posinf=bool((chosen == math.inf).any()),
        neginf=bool((chosen == -math.inf).any()),
    )
