"""Choose a format for each layer so that the cost is minimal and the error stays within a budget.

A choice of one format for each layer is called a placement. The rounding errors of different layers are
independent, so the squares of their errors add up::

    error(placement)^2 = sum over layers of error(layer, format of layer)^2

    cost(placement) = sum over layers of FLOPs(layer) / speed(format of layer)

The layers are added one after another. After each layer, a placement is dropped if another placement has both
a smaller error and a smaller cost. The remaining placements are called the Pareto front::

    Pareto front = [the empty placement]

    for each layer:

        combine each placement on the Pareto front with each format of the layer

        drop the placements whose error exceeds the budget

        keep the placements that are cheaper than all placements with a smaller error

    return the last placement on the Pareto front, which is the cheapest

The search finds the cheapest placement if it keeps the whole Pareto front. If the Pareto front has more than
1024 placements, it is shortened. The range of errors is divided into 1023 intervals, and only the cheapest
placement in each interval remains. If the Pareto front was shortened, the result can be slightly more
expensive than the cheapest placement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

SPEED: Final = {"bf16": 1.0, "fp8": 2.0, "fp8-rowwise": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}
"""The speed of matrix products in each format, relative to bf16.

The numbers are the peak rates of tensor cores since Hopper.
"""

_MOST: Final = 1024  # the Pareto front has at most this many placements

Numbers = Mapping[str, Mapping[str, float]]
"""The cost or the error of each layer in each format, as ``numbers[layer][format]``."""


def cost_of(placement: Mapping[str, str], costs: Numbers) -> float:
    """Return the cost of a placement, which maps layers to formats."""
    return sum(costs[layer][name] for layer, name in placement.items())


def error_of(placement: Mapping[str, str], errors: Numbers) -> float:
    """Return the expected error of a placement, which maps layers to formats."""
    return math.sqrt(sum(errors[layer][name] ** 2 for layer, name in placement.items()))


def place(costs: Numbers, errors: Numbers, budget: float) -> dict[str, str]:
    """Return the cheapest placement whose error is at most ``budget``.

    If every placement exceeds the budget, return the placement with the smallest error.
    """
    exact = {layer: min(of, key=of.__getitem__) for layer, of in errors.items()}
    if error_of(exact, errors) > budget:
        return exact
    # The factor 1 + 1e-12 allows for rounding, because error_of may add the squares in another order.
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
"""A placement of the first layers, as (square of the error, cost, formats of these layers)."""


def _undominated(placed: list[_Placed]) -> list[_Placed]:
    """Return the placements that are cheaper than all placements with a smaller error, sorted by error."""
    kept: list[_Placed] = []
    for candidate in sorted(placed):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept


def _thinned(front: list[_Placed], limit: float) -> list[_Placed]:
    """Return at most 1024 placements.

    Keep the placement with the smallest error, and the cheapest placement within each range of errors.
    """
    if len(front) <= _MOST:
        return front
    by_step = {int(placed[0] / limit * (_MOST - 2)): placed for placed in front}
    return [front[0], *(placed for placed in by_step.values() if placed is not front[0])]
