"""Which gradients of a step were not finite: remembered until the step, named, and what that means."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.kernels.reference import INF_FLAG, NAN_FLAG
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.loss_scale import moved
from amp_plugin.scaling.parameter_names import ParameterNames

_MOST_KEPT = 8  # measurements, before those of the same gradients are joined


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowReport:
    """Which parameters had gradients that are not finite.

    ``str(report)`` lists them, those nearest the loss first, and says what that means.

    Attributes:
        inf: Names of those with an infinite element, in the optimizer's order.
        nan: Names of those with a nan; a parameter may be in both.
        elsewhere: True if this rank's gradients are finite and another's made the step be skipped.
        unattributed: True if the norm was not finite, and which gradients made it so was not looked at.
        checked: How many gradients were looked at.
        named: Whether the parameters have names, not only numbers.
        scaled: Whether a loss scale above 1 may have caused it.
    """

    inf: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()
    elsewhere: bool = False
    unattributed: bool = False
    checked: int = field(default=0, compare=False)
    named: bool = field(default=True, compare=False)
    scaled: bool = field(default=False, compare=False)

    def __bool__(self) -> bool:
        """Whether anything overflowed."""
        return bool(self.inf or self.nan or self.elsewhere or self.unattributed)

    def __str__(self) -> str:
        """Return the summary and, in lines of their own, what it means."""
        return "\n".join(filter(None, [self.summary(), *self._meanings()]))

    def summary(self) -> str:
        """Return one line, naming the first few parameters, those nearest the loss first."""
        if self.unattributed:
            return "the norm of the gradients is not finite"
        if not self:
            return "no overflow"
        kinds = (("inf", self.inf), ("nan", self.nan))
        lines = [f"{kind} in {_first(names[::-1])}" for kind, names in kinds if names]
        return "; ".join(lines) or "overflow on another rank"

    def meaning(self) -> str:
        """Return what the report says about the cause, in one line; empty if nothing overflowed."""
        return " ".join(self._meanings())

    def _meanings(self) -> list[str]:
        if self.elsewhere:
            return [
                "The report of the rank with the overflow names its parameters: look at that rank's batch."
            ]
        if self.unattributed:
            return [
                "Which gradients made it so was not noted; on_nonfinite='skip' looks, and skips the step."
            ]
        overflowed = {*self.inf, *self.nan}
        if not overflowed:
            return []
        found = [self._place(len(overflowed))]
        if not self.named:
            found.append("The parameters have no names yet: call scaler.register(optimizer, names=model).")
        return found

    def _place(self, overflowed: int) -> str:
        """Say where in the step to look: all at once means that the loss or its first gradient was bad."""
        if overflowed < self.checked:
            return (
                "Others are finite: look at the backward pass near the first one named, "
                "or compute its module in fp32."
            )
        if self.scaled:
            return (
                "All gradients at once: the loss scale is still too high, which a few more skips mend; "
                "or else the loss or the forward pass is not finite: amp_plugin.diagnose() finds the op."
            )
        return (
            "All gradients at once: the loss or the forward pass is not finite: "
            "amp_plugin.diagnose() finds the op."
        )


def _first(names: Sequence[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    gradients = "1 gradient" if len(names) == 1 else f"{len(names)} gradients"
    return f"{gradients}: {', '.join(names[:count])}{more}"


class OverflowHistory:
    """Measurements that no longer describe the gradients, kept for what they found.

    A step with a gradient that was not finite is skipped, also if user code has written over it since:
    clipping by value turns an infinity into a number, and the step would be as wrong.

    Attributes:
        found_inf: 1.0 if one of them found an overflow, float32, 0-dim; None if there are none.
    """

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        self._measurements: list[Measurement] = []

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements that are about to be replaced."""
        for measurement in measurements:
            found = measurement.found_inf
            kept = self.found_inf
            self.found_inf = found if kept is None else torch.maximum(kept, moved(found, kept.device))
            self._measurements.append(measurement)
        if len(self._measurements) > _MOST_KEPT:
            self._join()

    def _join(self) -> None:
        """Make one measurement of those of the same gradients."""
        joined: list[Measurement] = []
        for kept in self._measurements:
            alike = (i for i, other in enumerate(joined) if other.positions == kept.positions)
            i = next((i for i in alike if joined[i].flags.device == kept.flags.device), None)
            if i is None:
                joined.append(kept._replace(flags=kept.flagged(), kept=()))
            else:
                joined[i] = joined[i]._replace(flags=joined[i].flags | kept.flagged())
        self._measurements = joined

    def measurements(self) -> list[Measurement]:
        """Return what was kept, for the flags of each gradient."""
        return list(self._measurements)

    def forget_if_zero(self, measurements: Iterable[Measurement]) -> None:
        """Forget all if the gradients are zero now: setting them to zero drops the batch."""
        if self.found_inf is None:
            return
        kept = None
        for measurement in measurements:
            nonzero = moved(measurement.norm.ne(0), self.found_inf.device)
            kept = nonzero if kept is None else kept | nonzero
        if kept is None:
            self.clear()
        else:
            self.found_inf = self.found_inf * kept
            self._measurements = [seen._replace(kept=(*seen.kept, kept)) for seen in self._measurements]

    def split(self, positions: Sequence[int]) -> OverflowHistory:
        """Return what was found in the gradients of the parameters at ``positions``."""
        part = OverflowHistory()
        for kept in self._measurements:
            places = range(len(kept.flags)) if kept.positions is None else kept.positions
            row = {place: i for i, place in enumerate(places)}
            present = [(new, row[old]) for new, old in enumerate(positions) if old in row]
            if present:
                flags = kept.flagged()[[i for _, i in present]]
                found, places = flags.ne(0).any().to(kept.found_inf), [new for new, _ in present]
                part.add([kept._replace(found_inf=found, flags=flags, positions=places, kept=())])
        return part

    def clear(self) -> None:
        """Forget all: the optimizer has stepped, or its gradients are gone."""
        self.found_inf = None
        self._measurements.clear()


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
