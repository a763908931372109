"""What the optimizer steps of a run came to: loss scale, norms, loss, and each skip with its reason."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor

from amp_plugin.run_page.headroom import shown
from amp_plugin.scaling.overflows import FirstModules, OverflowReport
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
    loss: float | None
    modules: FirstModules | None  # None if they were not watched yet

    @property
    def blames_scale(self) -> bool:
        """Whether a lower loss scale would do: only gradients were not finite, as far as anybody saw."""
        if self.scale is None or (self.loss is not None and not math.isfinite(self.loss)):
            return False
        if self.modules is None or not self.modules.numbers:
            return self.loss is not None or "nan" not in self.parameters
        return not self.modules.forward


class History:
    """The steps of one run, as its log tells them."""

    def __init__(self) -> None:
        self.steps = self.skipped = self._zero_steps = 0  # of all optimizers
        self.is_wrong = False  # whether the last step was skipped, or its loss or gradients were not finite
        self.growth = 1.0  # by which factor weights had grown when that was last so
        self.wrong_steps: list[int] = []  # whose loss was not finite, or the gradients though it was taken
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

    def add(self, step: LoggedStep, overflowed: OverflowReport | None) -> None:
        """Add a step that the host knows; ``overflowed`` names what was not finite in a skipped one."""
        result = step.result
        name = self._names.setdefault(id(step.optimizer()), f"{len(self._names)}: {step.kind}")
        self._counts[name] += 1
        number = self._counts[name]
        scale = result.scale_before if result.is_scaled else None
        loss = sum(float(part) for part in self._losses) if self._losses else None
        self._losses.clear()
        before = None if result.norm is None else float(result.norm)
        told = (loss, None if result.skipped else before)
        self._zero_steps += before == 0.0 and not result.skipped
        is_odd = not all(value is None or math.isfinite(value) for value in told)
        self.wrong_steps += [number] if is_odd else []
        self.is_wrong = is_odd or result.skipped
        self.steps += 1
        if number % self.per_point == 0:
            after = result.clipped_norm
            self._points.append(Point(number, name, scale, *map(shown, (before, after, loss))))
        if len(self._points) > _MOST_STEPS:
            self.per_point *= 2
            self._points = [point for point in self._points if point.step % self.per_point == 0]
        if overflowed is not None:
            self.skipped += 1
            skip = Skip(
                step=number,
                scale=scale,
                in_a_row=step.in_a_row,
                parameters=overflowed.summary(),
                meaning=overflowed.meaning(),
                loss=loss,
                modules=overflowed.modules,
            )
            self.skips += [skip] if len(self.skips) < _MOST_SKIPS else []

    @property
    def finding_scale(self) -> list[Skip]:
        """The skips that a run begins with, while its loss scale comes down; none if no step was taken."""
        if self.skipped == self.steps:
            return []
        skips = [skip for skip in self.skips if skip.in_a_row == skip.step]
        return skips if all(skip.blames_scale for skip in skips) else []

    @property
    def is_at_fault(self) -> bool:
        """Whether something went wrong that no lower loss scale mends."""
        return bool(self.wrong_steps) or not all(skip.blames_scale for skip in self.skips)

    @property
    def loss_growth(self) -> float:
        """How many times its first value the largest finite loss was in the steps before the last skip."""
        losses = [abs(point.loss) for point in self._points if point.loss is not None]
        return max(losses) / losses[0] if losses and losses[0] > 0 else 1.0

    @property
    def learns_nothing(self) -> bool:
        """Whether each step that was taken had gradients of zeros alone."""
        return 0 < self.steps - self.skipped == self._zero_steps

    def curves(self) -> dict[str, list[Any]]:
        """Return a column for each number of the points."""
        return {name: [getattr(point, name) for point in self._points] for name in Point._fields}
