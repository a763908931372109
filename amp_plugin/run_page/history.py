"""What the optimizer steps of a run came to: loss scale, norms, loss, and each skip with its reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor

from amp_plugin.numerics.finding import Finding
from amp_plugin.run_page.headroom import shown
from amp_plugin.scaling.step_log import LoggedStep

_MOST_STEPS: Final = 10_000  # points of a curve; beyond, every second one goes
_MOST_SKIPS: Final = 1_000  # kept with their parameters; all are counted


class Point(NamedTuple):
    """One optimizer step."""

    step: int  # counted from 1 for each optimizer
    optimizer: str
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
    findings: list[Finding]  # in it, or in another one skipped in a row with it, which has the same list

    @property
    def found(self) -> str:
        """Op, module and line of the first finding."""
        if not self.findings:
            return "not run again"
        finding = self.findings[0]
        op = finding.op.removeprefix("aten::").removesuffix(".default")
        return ", ".join(str(part) for part in (op, finding.module, finding.caller or finding.place) if part)

    @property
    def blames_scale(self) -> bool:
        """Whether a lower loss scale would do: what overflowed has done so in the backward pass."""
        found = [finding.direction == "backward" for finding in self.findings]
        return all(found or ["nan" not in self.parameters])


class Look(NamedTuple):
    """What was found in a step that was skipped, or whose loss was not finite."""

    step: int
    how: str  # it was looked at
    findings: tuple[Finding, ...]


class History:
    """The steps of one run, as its log tells them."""

    def __init__(self) -> None:
        self.steps = self.skipped = self._zero_steps = self._newest = 0  # of all optimizers
        self.is_wrong = False  # whether the last loss was not finite, or gradients of a step that was taken
        self.wrong_steps: list[int] = []  # of which that is true
        self.skips: list[Skip] = []  # the first ones
        self.per_point = 1  # of so many steps of an optimizer one is a point of the curves
        self._points: list[Point] = []
        self._names: dict[int, str] = {}  # of the optimizers
        self._counts: Counter[str] = Counter()
        self._losses: list[Tensor] = []

    def hear_loss(self, loss: Any) -> None:
        """Take a loss of the present window: those of its micro-batches are added up."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def add(self, step: LoggedStep) -> None:
        """Add a step that the host knows."""
        result = step.result
        name = self._names.setdefault(id(step.optimizer()), f"{len(self._names)}: {step.kind}")
        self._counts[name] += 1
        number = self._newest = self._counts[name]
        scale = result.scale_before if result.is_scaled else None
        loss = sum(float(part) for part in self._losses) if self._losses else None
        self._losses.clear()
        before = None if result.norm is None else float(result.norm)
        told = (loss, None if result.skipped else before)
        self._zero_steps += before == 0.0 and not result.skipped
        self.is_wrong = not all(value is None or math.isfinite(value) for value in told)
        self.wrong_steps += [number] if self.is_wrong else []
        self.steps += 1
        if number % self.per_point == 0:
            after = result.clipped_norm
            self._points.append(Point(number, name, scale, *map(shown, (before, after, loss))))
        if len(self._points) > _MOST_STEPS:
            self.per_point *= 2
            self._points = [point for point in self._points if point.step % self.per_point == 0]
        if result.skipped:
            self.skipped += 1
            report = result.overflow_report()
            skip = Skip(
                step=number,
                scale=scale,
                in_a_row=step.in_a_row,
                parameters=report.summary(),
                meaning=report.meaning(),
                findings=self.skips[-1].findings if step.in_a_row > 1 and self.skips else [],
            )
            self.skips += [skip] if len(self.skips) < _MOST_SKIPS else []

    def explain(self, findings: Sequence[Finding], how: str) -> Look:
        """Add what was found to the skips that have just been, in a row, and return it."""
        if self.skips and self.skips[-1].step >= self._newest - 1:
            self.skips[-1].findings[:] = findings or self.skips[-1].findings
        return Look(step=self._newest, how=how, findings=tuple(findings))

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

    def curves(self) -> dict[str, list[Any]]:
        """Return a column for each number of the points."""
        return {name: [getattr(point, name) for point in self._points] for name in Point._fields}
