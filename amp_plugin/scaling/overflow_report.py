"""Which gradients of a step were not finite, and what that says about the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
