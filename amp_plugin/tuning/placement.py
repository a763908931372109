"""Choose a format for each layer (a placement): the cheapest placement whose error is within a budget.

The rounding errors of the layers are independent, so their squares add up::

    error(placement)^2 = sum of error(layer, format of layer)^2
    cost(placement)    = sum of FLOPs(layer) / speed(format of layer)

The layers are added one after the other. A placement of the first layers is kept only if no other one is
better in both error and cost (the Pareto front)::

    front = [the empty placement]
    for each layer:
        front = each placement in front, with each format of the layer, if its error is within the budget
        front = the placements that are cheaper than every placement with a smaller error
    return the last placement of front, which is the cheapest

This finds the cheapest placement. If the front has more than 1024 placements, only the cheapest of each 1023
intervals of the error is kept, so the result can be slightly more expensive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

SPEED: Final = {"bf16": 1.0, "fp8": 2.0, "fp8-rowwise": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}
"""The speed of matrix products in each format, relative to bf16: peak rates of tensor cores since Hopper."""

_MOST: Final = 1024  # the most placements of a front

Numbers = Mapping[str, Mapping[str, float]]
"""A cost or an error for each layer and format: ``numbers[layer][format]``."""


def cost_of(placement: Mapping[str, str], costs: Numbers) -> float:
    """Return the cost of a placement, a mapping from layers to formats."""
    return sum(costs[layer][name] for layer, name in placement.items())


def error_of(placement: Mapping[str, str], errors: Numbers) -> float:
    """Return the expected error of a placement."""
    return math.sqrt(sum(errors[layer][name] ** 2 for layer, name in placement.items()))


def place(costs: Numbers, errors: Numbers, budget: float) -> dict[str, str]:
    """Return the cheapest placement whose error is at most ``budget``.

    If every placement exceeds the budget, return the one with the smallest error.
    """
    exact = {layer: min(of, key=of.__getitem__) for layer, of in errors.items()}
    if error_of(exact, errors) > budget:
        return exact
    # The factor allows for rounding: the squares may be added in another order here than in error_of.
    limit = budget**2 * (1 + 1e-12)
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
    """Return the placements that are cheaper than every one with a smaller error, in the order of error."""
    kept: list[_Placed] = []
    for candidate in sorted(placed):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept


def _thinned(front: list[_Placed], limit: float) -> list[_Placed]:
    """Return at most 1024 placements: the first, and the cheapest (the last) in each interval of error."""
    if len(front) <= _MOST:
        return front
    by_step = {int(placed[0] / limit * (_MOST - 2)): placed for placed in front}
    return [front[0], *(placed for placed in by_step.values() if placed is not front[0])]
