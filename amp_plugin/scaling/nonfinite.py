"""What is done about a step whose gradients are not finite: skip it, raise, or ignore it."""

from __future__ import annotations

from torch.optim import Optimizer

from amp_plugin.options import OnNonfinite
from amp_plugin.scaling.step_result import StepResult


class NonfiniteSteps:
    """Raise for steps that were skipped, as soon as the host knows, where the user wants that.

    Args:
        on_nonfinite: Only ``"raise"`` does anything.
        blameless_scale: The largest loss scale at which a lower one would not help.
    """

    def __init__(self, on_nonfinite: OnNonfinite, blameless_scale: float) -> None:
        self._raises = on_nonfinite == "raise"
        self._blameless_scale = blameless_scale
        self._unknown: list[tuple[str, StepResult]] = []

    def note(self, optimizer: Optimizer, result: StepResult) -> None:
        """Note a step; raise if it, or an earlier one, is known to be skipped by now.

        Raises:
            FloatingPointError: It is, and no lower loss scale would help.
        """
        if self._raises:
            self._unknown.append((type(optimizer).__name__, result))
            self.raise_if_known()

    def raise_if_known(self) -> None:
        """Raise if the host knows by now of such a step, without waiting.

        Raises:
            FloatingPointError: It does.
        """
        while self._unknown and self._unknown[0][1].skipped_if_known() is not None:
            kind, result = self._unknown.pop(0)
            if result.skipped and result.scale_before <= self._blameless_scale:
                self._unknown.clear()
                raise FloatingPointError(_text(kind, result))


def _text(kind: str, result: StepResult) -> str:
    report = result.overflow_report()
    scaled = "" if result.scale_before == 1.0 else f" at a loss scale of {result.scale_before:g}"
    return (
        f"{kind}: gradients are not finite{scaled} ({report.summary()}); the step was not taken, the weights "
        f"are those of before. {report.meaning()} on_nonfinite='skip' goes on without such steps."
    )
