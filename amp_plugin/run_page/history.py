"""Keep the history of a run's optimizer steps, with loss scale, gradient norms, loss and skipped steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from torch import Tensor

from amp_plugin.run_page.headroom import shown
from amp_plugin.scaling.overflows import OverflowReport
from amp_plugin.scaling.step_log import StepResult

_MOST_STEPS: Final = 10_000  # if a curve has more points than this, every second point is dropped
# If an earlier step succeeded at this many times the current scale, lowering the scale does not help.
_FAR_LOWER: Final = 4.0
_MOST_SKIPS: Final = 1_000  # the details of at most this many skipped steps are kept


class Point(NamedTuple):
    """One optimizer step."""

    step: int  # the number of the step in the step log
    optimizer: str
    scale: float | None
    before: float | None  # the norm of the unscaled gradients before clipping
    after: float | None  # the norm of the unscaled gradients after clipping
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A skipped step."""

    step: int  # the number of the step in the step log
    optimizer: str
    scale: float | None  # the loss scale; None if the loss is not scaled
    in_a_row: int  # the number of consecutive skipped steps, including this one
    report: OverflowReport
    loss: float | None
    # False if steps are skipped although the loss scale is far below a value that worked before.
    lowering_helps: bool = True

    @property
    def parameters(self) -> str:
        """One line that names the parameters whose gradients were not finite."""
        return self.report.summary()

    @property
    def meaning(self) -> str:
        """One line about the possible cause of the skipped step."""
        return self._judged.meaning()

    @property
    def modules(self) -> str:
        """One line about the first module with an inf or nan; empty if no hooks were watching modules."""
        return self._judged.where()

    @property
    def _judged(self) -> OverflowReport:
        """The overflow report, which blames the loss scale only if a lower one may help."""
        return replace(self.report, scaled=self.report.scaled and self.lowering_helps)

    @property
    def is_spike(self) -> bool:
        """Whether the step was skipped because of a spike in the gradient norm, rather than an inf or nan."""
        return bool(self.report.spike)

    @property
    def blames_scale(self) -> bool:
        """Whether a lower loss scale would help.

        A lower loss scale helps if gradients are non-finite although the loss and the forward pass seem to be
        finite.
        """
        if self.is_spike or self.scale is None or not self.lowering_helps:
            return False
        if self.loss is not None and not math.isfinite(self.loss):
            return False
        modules = self.report.modules
        if modules is None or not modules.numbers:
            return self.loss is not None or "nan" not in self.parameters
        return not modules.forward


class History:
    """The optimizer steps of one run, taken from its step log."""

    def __init__(self) -> None:
        self.steps = self.skipped = self._zero_steps = 0  # numbers of steps of all optimizers
        self.is_wrong = False  # whether the last step was skipped or had a non-finite loss or gradient
        # The largest factor by which a weight's norm had grown at the last skipped or non-finite step.
        self.growth = 1.0
        # The steps whose loss was not finite, or that updated weights with non-finite gradients.
        self.wrong_steps: list[int] = []
        self.skips: list[Skip] = []  # the first _MOST_SKIPS skipped steps
        self.per_point = 1  # the number of optimizer steps from one point of a curve to the next
        self._points: list[Point] = []
        # The optimizers whose steps keep being skipped although the loss scale falls.
        self._unhelped: set[str] = set()
        # Maps an optimizer to the loss scale of its last step that was not skipped.
        self._landed_at: dict[str, float] = {}
        self._losses: list[Tensor] = []

    def note_growth(self, factor: float) -> None:
        """Record the largest factor by which the norm of a weight has grown so far.

        This method is called after each skipped or non-finite step.
        """
        self.growth = factor

    def hear_loss(self, loss: Any) -> None:
        """Add the loss of a micro-batch to the loss of the current step."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def add(self, result: StepResult, overflowed: OverflowReport | None) -> None:
        """Add a step, once the host knows whether it was skipped.

        If the step was skipped, ``overflowed`` names the gradients that were not finite.
        """
        self.steps += 1
        number, scale = result.number, result.scale_before if result.is_scaled else None
        loss = sum(float(part) for part in self._losses) if self._losses else None
        self._losses.clear()
        before = None if result.norm is None else float(result.norm)
        told = (loss, None if result.skipped else before)
        self._zero_steps += before == 0.0 and not result.skipped
        is_odd = not all(value is None or math.isfinite(value) for value in told)
        self.wrong_steps += [number] if is_odd else []
        self.is_wrong = is_odd or result.skipped
        if number % self.per_point == 0:
            after = result.clipped_norm
            self._points.append(Point(number, result.name, scale, *map(shown, (before, after, loss))))
        if len(self._points) > _MOST_STEPS:
            self.per_point *= 2
            self._points = [point for point in self._points if point.step % self.per_point == 0]
        if overflowed is None:
            self._landed_at[result.name] = scale or 1.0
            self._note_help(result.name, after=-1, helps=True)  # this step was not skipped
            return
        self.skipped += 1
        skip = Skip(
            step=number,
            optimizer=result.name,
            scale=scale,
            in_a_row=result.in_a_row,
            report=overflowed,
            loss=loss,
        )
        self.skips += [skip] if len(self.skips) < _MOST_SKIPS else []
        if scale and scale * _FAR_LOWER <= self._landed_at.get(result.name, 0.0):
            self._note_help(result.name, after=number - result.in_a_row, helps=False)

    def _note_help(self, optimizer: str, *, after: int, helps: bool) -> None:
        """Record whether a lower loss scale would prevent an optimizer's skips after step ``after``."""
        if helps and optimizer not in self._unhelped:
            return
        (self._unhelped.discard if helps else self._unhelped.add)(optimizer)
        self.skips = [
            replace(skip, lowering_helps=helps) if skip.optimizer == optimizer and skip.step > after else skip
            for skip in self.skips
        ]

    @property
    def finding_scale(self) -> list[Skip]:
        """The skipped steps at the beginning of a run, while the scaler searches for the loss scale.

        If every step of the run was skipped, the property is an empty list.
        """
        if self.skipped == self.steps:
            return []
        skips = [skip for skip in self.skips if skip.in_a_row == skip.step]
        return skips if all(skip.blames_scale for skip in skips) else []

    @property
    def is_at_fault(self) -> bool:
        """Whether something other than the loss scale is at fault."""
        return bool(self.wrong_steps) or not all(skip.blames_scale or skip.is_spike for skip in self.skips)

    @property
    def spikes(self) -> int:
        """The number of steps in ``skips`` that were skipped because of a spike in the gradient norm."""
        return sum(skip.is_spike for skip in self.skips)

    @property
    def loss_growth(self) -> float:
        """The largest finite loss so far, divided by the first loss."""
        losses = [abs(point.loss) for point in self._points if point.loss is not None]
        return max(losses) / losses[0] if losses and losses[0] > 0 else 1.0

    @property
    def learns_nothing(self) -> bool:
        """Whether all gradients were zero in every step that was not skipped."""
        return 0 < self.steps - self.skipped == self._zero_steps

    def curves(self) -> dict[str, list[Any]]:
        """Map the name of each curve to its values at all points."""
        return {name: [getattr(point, name) for point in self._points] for name in Point._fields}
