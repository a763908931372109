"""Decide where a number that is not finite comes from: made here, read here, or put there on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from amp_plugin.numerics.op import Argument, OpTraits
from amp_plugin.numerics.values import Held, non_finite, real_values

Verdict = Literal["made", "on purpose", "masked", "passed on"]

# Share of a dtype's largest number beyond which numbers are masks. Nobody computes with 1e38. In fp16
# activations and scaled gradients do get near 65504, so there it is the end of the range alone.
_MASKING, _MASKING_IN_FP16 = 0.25, 0.999


class Judgement(NamedTuple):
    """What became of one result.

    ``"made"`` from inputs that do not explain it; ``"on purpose"``: a constant of the caller; ``"masked"``:
    -inf from numbers so large that only masks have them; ``"passed on"`` from an input.
    """

    verdict: Verdict
    held: Held  # what it made, or what it passes on
    of: Sequence[Argument] = ()  # the arguments that were not finite, those with a nan first


def judge(
    result: Argument, given: Sequence[Argument], traits: OpTraits, scalars: Sequence[float]
) -> Judgement:
    """Return where the numbers of one result that are not finite come from."""
    if traits.is_listwise and result.index is not None:
        given = [argument for argument in given if argument.index in {None, result.index}]
    values = non_finite(result.tensor)
    unfinite = sorted((argument for argument in given if argument.held), key=lambda a: "nan" not in a.held)
    own: list[tuple[Held, Tensor | None]] = [] if unfinite else [(values, None)]  # none from an input
    if unfinite and traits.is_pointwise and (new := _new_elements(result.tensor, unfinite)) is not None:
        own.append((non_finite(result.tensor, new), new))
    if unfinite and traits.moves:  # it did not find what no argument has
        brought = {name for argument in unfinite for name in argument.held}
        own.append((tuple(name for name in values if name not in brought), None))
    for held, where in own:
        if not held:
            continue
        verdict: Verdict = "made"
        if _are_constants(held, scalars, computes=bool(given) and not traits.moves):
            verdict = "on purpose"
        elif held == ("-inf",) and _is_masked(result.tensor, given, where):
            verdict = "masked"
        if verdict == "made" or not unfinite:
            return Judgement(verdict, held)
    if "nan" in values and "nan" not in unfinite[0].held and not any(map(math.isnan, scalars)):
        return Judgement("made", ("nan",), unfinite)
    return Judgement("passed on", values, unfinite)


def _are_constants(held: Held, scalars: Sequence[float], *, computes: bool) -> bool:
    """Whether numbers are those that the caller gave; an op that computes may turn an infinity's sign."""
    if "nan" in held:
        return any(map(math.isnan, scalars))
    if computes:
        return any(map(math.isinf, scalars))
    return all(float(name) in scalars for name in held)


def _is_masked(result: Tensor, given: Sequence[Argument], where: Tensor | None) -> bool:
    """Whether each -inf stands where an input has a number from the end of its dtype's range."""
    values = real_values(result)
    if values is None:
        return False
    infinite = values == -math.inf
    if where is not None:
        infinite = infinite & where
    for argument in given:
        if argument.values is not None:
            largest = torch.finfo(argument.tensor.dtype).max
            huge = argument.values <= -(_MASKING if largest > 1e38 else _MASKING_IN_FP16) * largest
            spread = _spread(huge, infinite)
            if spread is not None and bool((spread | ~infinite).all()):
                return True
    return False


def _new_elements(result: Tensor, unfinite: Sequence[Argument]) -> Tensor | None:
    """Return where a pointwise result is not finite though every input is; None if that cannot be read."""
    values = real_values(result)
    if values is None:
        return None
    new = ~values.isfinite()
    for argument in unfinite:
        if argument.values is None:
            return None
        finite = argument.values.isfinite()
        if argument.tensor.is_complex():  # either part of a number spoils both of what is made of it
            finite = finite.all(-1, keepdim=True).expand_as(finite)
        spread = _spread(finite, new)
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
