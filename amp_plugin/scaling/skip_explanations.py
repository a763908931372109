"""Explain a run that only skips: its failing step is run once more, before much time is lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.options import whole
from amp_plugin.scaling.replay import Explainer, Recorder, Replay
from amp_plugin.scaling.skips_in_a_row import SkipsInARow
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.user_warnings import warn_user


class SkipExplanations:
    """Calls an explainer once, when so many steps of an optimizer were skipped in a row.

    Attributes:
        replaying: Whether a step is being run again at the moment.
    """

    def __init__(self) -> None:
        self.replaying = False
        self._explainer: Explainer | None = None
        self._after = 0
        self._skips = SkipsInARow()
        self._recorder = Recorder()
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}

    def begin(self, explainer: Explainer, after: int) -> None:
        """Wait for so many skips in a row.

        Raises:
            ValueError: ``after`` is below 2: the calls of a step are remembered once one was skipped.
        """
        if whole("after", after) < 2:
            msg = f"after={after!r} is not allowed; give at least 2 skipped steps in a row"
            raise ValueError(msg)
        self._explainer, self._after = explainer, after
        self._skips.begin_anew()

    def run(self, call: Callable[[], Any]) -> Any:
        """Run forward and backward passes, and remember them while steps are being skipped."""
        if self._explainer is None or self.replaying:
            return call()
        self._recorder.remember(call, wanted=self._skips.going_on())
        return call()

    def note(self, optimizer: Optimizer, result: StepResult, params: Callable[[], Sequence[Tensor]]) -> None:
        """Note a step; explain if it is one too many.

        Args:
            optimizer: The optimizer.
            result: What became of the step.
            params: Returns the parameters whose gradients are set aside meanwhile.
        """
        self._recorder.end_window()
        if self._explainer is None or self.replaying:
            return
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._skips.note(id(optimizer), result)
        for step in self._skips.read(wait=False):
            stepped = self._optimizers[step.key]()
            if step.in_a_row == self._after and self._recorder.calls and stepped is not None:
                self._explain(self._recorder.replay_of(step, stepped, params()))
                return

    def _explain(self, replay: Replay) -> None:
        explainer, self._explainer, self.replaying = self._explainer, None, True
        try:
            text = explainer(replay) if explainer is not None else ""
        finally:
            self.replaying = False
        warn_user(
            f"{replay.in_a_row} steps of {type(replay.optimizer).__name__} in a row were skipped "
            f"({replay.result.overflow_report().summary()}). The last was run once more:\n{text}"
        )
