"""What the optimizer steps of a run came to: loss scale, norms, loss, and each skip with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor

from amp_plugin.numerics.finding import Finding
from amp_plugin.scaling.step_log import LoggedStep

_MOST_STEPS: Final = 10_000  # points of a curve; beyond, two neighbours become one
_MOST_UNSETTLED: Final = 128
_MOST_SKIPS: Final = 1_000  # kept with their parameters; all are counted

Columns = dict[str, list[Any]]
T = TypeVar("T")


class Point(NamedTuple):
    """One optimizer step, or several in a row of a long run."""

    step: int  # counted from 1 for each optimizer
    optimizer: int  # its place among those that have stepped
    scale: float | None
    before: float | None  # norm of the unscaled gradients before clipping
    after: float | None  # the same after clipping
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A skipped step."""

    step: int  # counted from 1 for its optimizer
    scale: float | None  # None if nothing is scaled
    in_a_row: int  # this one included
    parameters: str  # whose gradients were not finite, in one line
    meaning: str
    findings: tuple[Finding, ...] = field(default=())  # in it, or in another one skipped in a row with it

    @property
    def place(self) -> str:
        """Op and line of the first finding; empty if there is none."""
        return located(self.findings[0]) if self.findings else ""

    @property
    def blames_scale(self) -> bool:
        """Whether a lower loss scale would do: what overflowed has done so in the backward pass."""
        found = [finding.direction == "backward" for finding in self.findings]
        return all(found) if found else "nan" not in self.parameters


def located(finding: Finding) -> str:
    """Return the op, the module and the line of a finding, in one line."""
    line = finding.caller or finding.place
    op = finding.op.removeprefix("aten::").removesuffix(".default")
    module = f" in {finding.module}" if finding.module else ""
    return f"{op}{module}" + (f", {line}" if line else "")


class Look(NamedTuple):
    """What was found in a step that was skipped, or whose loss was not finite."""

    step: int
    how: str  # it was looked at
    findings: tuple[Finding, ...]


class History:
    """The steps of one run, as its log tells them.

    Attributes:
        steps: How many there were, of all optimizers.
        skipped: How many of them were skipped.
        is_wrong: Whether the loss of the last one was not finite, or its gradients though it was taken.
        wrong_steps: The steps of which that is true.
        skips: The first of those, with their parameters.
        per_point: Steps that a point of the curves stands for.
    """

    def __init__(self) -> None:
        self.steps = self.skipped = self._zero_steps = 0
        self.is_wrong = False
        self.wrong_steps: list[int] = []
        self.skips: list[Skip] = []
        self.per_point = 1
        self._points: list[Point] = []
        self._clipped: dict[int, Callable[[], Tensor]] = {}  # point -> its norm after clipping, to compute
        self._counts: dict[int, tuple[int, int]] = {}  # of each optimizer: its place, its steps
        self._kinds: list[str] = []
        self._losses: list[Tensor] = []

    def hear_loss(self, loss: Any) -> None:
        """Take a loss of the present window: those of its micro-batches are added up."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def add(self, step: LoggedStep) -> None:
        """Add a step that the host knows."""
        result = step.result
        optimizer, number = self._count(step)
        scale = result.scale_before if result.is_scaled else None
        loss = sum(float(part) for part in self._losses) if self._losses else None
        self._losses.clear()
        before = None if result.norm is None else float(result.norm)
        told = (loss, None if result.skipped else before)
        self._zero_steps += before == 0.0 and not result.skipped
        self.is_wrong = not all(value is None or math.isfinite(value) for value in told)
        self.wrong_steps += [number] if self.is_wrong else []
        self.steps += 1
        if result.clipped_later is not None:
            self._clipped[len(self._points)] = result.clipped_later
        self._points.append(Point(number, optimizer, scale, _shown(before), _shown(before), _shown(loss)))
        if len(self._clipped) > _MOST_UNSETTLED:
            self._settle()
        if len(self._points) > _MOST_STEPS:
            self._settle()
            self._points, self.per_point = halved(self._points, _joined), self.per_point * 2
        if result.skipped:
            self.skipped += 1
            report = result.overflow_report()
            skip = Skip(
                step=number,
                scale=scale,
                in_a_row=step.in_a_row,
                parameters=report.summary(),
                meaning=report.meaning(),
                findings=self.skips[-1].findings if step.in_a_row > 1 and self.skips else (),
            )
            self.skips += [skip] if len(self.skips) < _MOST_SKIPS else []

    def _settle(self) -> None:
        """Compute the norms after clipping: some ops each, which cost less for many steps in a row."""
        for place, clipped in self._clipped.items():
            self._points[place] = self._points[place]._replace(after=_shown(float(clipped())))
        self._clipped.clear()

    def _count(self, step: LoggedStep) -> tuple[int, int]:
        """Return the place of a step's optimizer, and the step's number among its steps."""
        place, steps = self._counts.get(id(step.optimizer()), (len(self._counts), 0))
        self._counts[id(step.optimizer())] = place, steps + 1
        if place == len(self._kinds):
            self._kinds.append(step.kind)
        return place, steps + 1

    def explain(self, findings: Sequence[Finding], how: str) -> Look:
        """Add what was found to the skips that have just been, in a row, and return it."""
        last = self.last()
        look = Look(step=last.step if last else 0, how=how, findings=tuple(findings))
        row = self.skips[-1].in_a_row if self.skips and self.skips[-1].step >= look.step - 1 else 0
        for place in range(max(0, len(self.skips) - row), len(self.skips)) if findings else ():
            self.skips[place] = replace(self.skips[place], findings=look.findings)
        return look

    @property
    def has_scale(self) -> bool:
        """Whether losses are scaled."""
        return any(point.scale is not None for point in self._points)

    @property
    def finding_scale(self) -> list[Skip]:
        """The skips that a run begins with, while its loss scale comes down; none if no step was taken."""
        if self.skipped == self.steps:
            return []
        skips = [skip for skip in self.skips if skip.in_a_row == skip.step and skip.scale is not None]
        return skips if all(skip.blames_scale for skip in skips) else []

    @property
    def learns_nothing(self) -> bool:
        """Whether each step that was taken had gradients of zeros alone."""
        return 0 < self.steps - self.skipped == self._zero_steps

    @property
    def optimizers(self) -> int:
        """How many optimizers have stepped."""
        return len(self._counts)

    def last(self) -> Point | None:
        """Return the newest point."""
        return self._points[-1] if self._points else None

    def curves(self) -> Columns:
        """Return a column for each number of the points."""
        self._settle()
        columns = {name: [getattr(point, name) for point in self._points] for name in Point._fields}
        columns |= {name: [*map(_rounded, columns[name])] for name in ("before", "after", "loss")}
        return columns | {"optimizer": [f"{i}: {self._kinds[i]}" for i in columns["optimizer"]]}

    def marks(self) -> Columns:
        """Return a column for each thing to know of the skips."""
        return {
            "step": [skip.step for skip in self.skips],
            "scale": [skip.scale for skip in self.skips],
            "parameters": [skip.parameters for skip in self.skips],
            "found": [skip.place or "not run again" for skip in self.skips],
        }


def halved(points: list[T], join: Callable[[T, T], T]) -> list[T]:
    """Return one point for two neighbours."""
    return [*map(join, points[::2], points[1::2]), *(points[-1:] if len(points) % 2 else [])]


def _joined(first: Point, second: Point) -> Point:
    """Return the first one's number, the lower scale, the larger norms."""

    def among(name: str) -> list[float]:
        return [value for point in (first, second) if (value := getattr(point, name)) is not None]

    return first._replace(
        scale=min(among("scale"), default=None),
        before=max(among("before"), default=None),
        after=max(among("after"), default=None),
        loss=sum(among("loss")) / len(among("loss")) if among("loss") else None,
    )


def _shown(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    """Return five digits of a number."""
    return None if value is None else float(f"{value:.5g}")
