"""Place layers in formats: the least cost whose error stays within a budget.

Errors of layers are independent roundings, so their squares add up::

    error(placement)^2 = sum of error(layer, format of layer)^2
    cost(placement)    = sum of FLOPs(layer) / speed(format of layer)

Layer by layer, placements of the layers so far are kept that no other one beats in both error and cost::

    front = [the empty placement]
    for each layer:
        front = each of front with each format of the layer, within the budget
        front = those with less cost than all that have a smaller error
    return the last of front, which costs least

That finds the placement of least cost. If a front has more than 1024 placements, it is thinned: of
neighbours with nearly the same error the cheaper one stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

SPEED: Final = {"bf16": 1.0, "fp8": 2.0, "fp8-rowwise": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}
"""Format -> matrix products in a second, bf16 is 1: the peak rates of tensor cores from Hopper on."""

_MOST: Final = 1024  # placements of a front

Numbers = Mapping[str, Mapping[str, float]]
"""Layer -> format -> a cost, or an error."""


def cost_of(placement: Mapping[str, str], costs: Numbers) -> float:
    """Return the cost of a placement, which is layer -> format."""
    return sum(costs[layer][name] for layer, name in placement.items())


def error_of(placement: Mapping[str, str], errors: Numbers) -> float:
    """Return the error that a placement is expected to have."""
    return math.sqrt(sum(errors[layer][name] ** 2 for layer, name in placement.items()))


def place(costs: Numbers, errors: Numbers, budget: float) -> dict[str, str]:
    """Return layer -> format: the placement of least cost with an error of at most ``budget``.

    If even the most exact formats exceed the budget, these are the placement.
    """
    exact = {layer: min(of, key=of.__getitem__) for layer, of in errors.items()}
    if error_of(exact, errors) > budget:
        return exact
    limit = budget**2 * (1 + 1e-12)  # sums of squares in another order differ in their last bits
    front: list[_Placed] = [(0.0, 0.0, ())]
    for layer, of in errors.items():
        grown = [
            (spent + error**2, cost + costs[layer][name], (*names, name))
            for spent, cost, names in front
            for name, error in of.items()
            if spent + error**2 <= limit
        ]
        front = _thinned(_undominated(grown), limit)
    return dict(zip(errors, front[-1][2], strict=True))


_Placed = tuple[float, float, tuple[str, ...]]
"""The square of the error, the cost, and the formats of the layers so far."""


def _undominated(placed: list[_Placed]) -> list[_Placed]:
    """Return those that cost less than all with a smaller error, the smallest error first."""
    kept: list[_Placed] = []
    for candidate in sorted(placed):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept


def _thinned(front: list[_Placed], limit: float) -> list[_Placed]:
    """Return at most 1024: of each step of error the cheapest, which is the last, and the very first."""
    if len(front) <= _MOST:
        return front
    by_step = {int(placed[0] / limit * (_MOST - 2)): placed for placed in front}
    return [front[0], *(placed for placed in by_step.values() if placed is not front[0])]
