"""From the flags of measurements to the names of the parameters whose gradients are not finite."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels.reference import INF_FLAG, NAN_FLAG
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.overflow_report import OverflowReport
from amp_plugin.scaling.parameter_names import ParameterNames


class Attribution(NamedTuple):
    """What is needed to say which gradients of a step were not finite.

    Attributes:
        params: All parameters the optimizer had.
        measured: Parameters, and a measurement of their gradients.
        names: The names given to parameters.
        optimizer: The optimizer, which may no longer exist when the names are asked for.
    """

    params: list[Tensor]
    measured: Sequence[tuple[list[Tensor], Measurement]]
    names: ParameterNames
    optimizer: weakref.ref[Optimizer]

    def report(self) -> OverflowReport:
        """Read the flags: a host sync."""
        index = {id(param): i for i, param in enumerate(self.params)}
        flags: dict[int, int] = {}
        for params, measurement in self.measured:
            positions = range(len(params)) if measurement.positions is None else measurement.positions
            for position, flag in zip(positions, measurement.flagged().tolist(), strict=True):
                place = index[id(params[position])]
                flags[place] = flags.get(place, 0) | flag
        names = self.names.of(self.params, self.optimizer())
        overflowed = [place for place in sorted(flags) if flags[place]]
        return OverflowReport(
            inf=tuple(names[place] for place in overflowed if flags[place] & INF_FLAG),
            nan=tuple(names[place] for place in overflowed if flags[place] & NAN_FLAG),
            checked=len(flags),
            named=all(self.names.has(self.params[place], self.optimizer()) for place in overflowed),
        )
