"""Find the first op that makes a number which is not finite and matters, or say why nothing is learnt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torch import nn

from amp_plugin.numerics.finding import Finding, NonFiniteError
from amp_plugin.numerics.formats import FormatLog
from amp_plugin.numerics.learning import Learning
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region, listed
from amp_plugin.numerics.refusals import Refused, findings_at_end, refused
from amp_plugin.numerics.scaled_clips import ScaledClips
from amp_plugin.numerics.values import unwatched
from amp_plugin.numerics.watch import PATIENCE, Watch


class Diagnosis(Region):  # type: ignore[no-untyped-call]
    """A region in which every op is watched; see ``diagnose``.

    Attributes:
        findings: what was found, in order; one at most unless ``keep_going``, where those of one op and line
            are one finding with a count.
        read: numbers that are not finite and reached no loss, gradient or weight, but that Python has read (a
            metric, NumPy), or that an op such as argmin has chosen by; those of one op and line once.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        keep_going: bool = False,
        strict: bool = False,
        patience: int = PATIENCE,  # backward passes in a row whose fp16 gradients may overflow, less one
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self.read: list[Finding] = []
        self._on_finding, self._raises = on_finding, not keep_going
        self._known: dict[tuple[object, ...], int] = {}  # what findings are about -> which one is
        tracker = Tracker(model)
        self._watch = Watch(tracker, self._found, strict=strict, patience=patience)
        self._learning = Learning(tracker)
        self._formats = FormatLog(tracker)
        self._refused: Refused | None = None  # the last op that torch refused for its dtypes
        super().__init__(tracker, self._watch, self._learning, self._formats, self)

    def open(self, stack: ExitStack) -> None:
        """Watch the clips of torch's, too."""
        stack.enter_context(ScaledClips(self._found))

    def failed(self, call: Call, error: BaseException) -> None:
        """Find out whether torch refused the dtypes of an op."""
        self._refused = refused(self.tracker, call, error) or self._refused

    def ended(self, error: BaseException | None) -> None:
        """Look at what is left: numbers that are not finite, and without any why nothing is learnt."""
        last, self._refused = self._refused, None  # an error holds the frames of the program
        if error is None or isinstance(error, SystemExit):
            self.tracker.ends()
            self._raises = self._raises and error is None
            with unwatched():
                self._watch.left_over()
            for finding in self._learning.findings() if not self.findings else ():
                self._found(finding)
        elif not isinstance(error, NonFiniteError):
            self._raises = False  # the program's own error goes on
            with unwatched():
                for finding in findings_at_end(self.tracker, last, error):
                    self._found(finding)
        self.read = [*{_about(finding): finding for finding in self._watch.read_elsewhere()}.values()]

    def report(self) -> str:
        """Return all findings as text; else that there is none, and what could not be seen."""
        below = [f"{layer}, {operand}: {found}" for (layer, operand), found in self._formats.ranges().items()]
        if self.findings:
            return "\n\n".join([*map(str, self.findings), *filter(None, ["\n".join(below)])])
        lines = ["every number that mattered was finite"]
        if self.read:
            lines = ["every number that reached a loss, a gradient or a weight was finite", *self.notes()]
        lines += below
        if unseen := self.unseen:
            lines.append(f"not looked into, or not in a wider dtype: {listed(unseen)}")
        if self.has_compiled:
            lines.append(
                "compiled functions ran eagerly; `amp-plugin diagnose --compare eager` compares them"
            )
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return a line for each of ``read``, and how to stop there."""
        if not self.read:
            return []
        lines = [f"  {found.headline}, at {found.place}: {found.reached}" for found in self.read]
        return [
            "others were not, and were read outside of training:",
            *lines,
            "`amp-plugin diagnose --strict train.py` stops at the first of them and says what to do",
        ]

    def _found(self, finding: Finding) -> None:
        """Add a finding; those of one op and line are one with a count."""
        index = self._known.setdefault(_about(finding), len(self.findings))
        if index < len(self.findings):
            first = self.findings[index]
            self.findings[index] = replace(first, count=first.count + 1)
            return
        self.findings.append(finding)
        if self._on_finding is not None:
            self._on_finding(finding)
        if self._raises:
            raise NonFiniteError(finding)


def _about(finding: Finding) -> tuple[object, ...]:
    """Return what two findings share that are one."""
    return finding.kind, finding.op, finding.forward_op, finding.place, finding.cause, finding.lesson


def diagnose(model: nn.Module | None = None, *, keep_going: bool = False, strict: bool = False) -> Diagnosis:
    """Watch every op of a region and stop at the first number that is not finite and matters.

    Forward, backward and optimizer step, in any precision, with autocast or without. The error names op,
    module, line, cause, dtype, rule, the ranges of the inputs, and what to do. Numbers that are not finite
    are followed until they reach a loss, a gradient, a weight or an optimizer's state: masks of -inf, what
    torch masks in its own derivatives, and numbers that vanish again raise nothing. In a region without a
    backward pass those matter that nothing has hidden at its end. A region that ends with all numbers finite
    is looked at for learning: no step taken, updates that a weight's dtype lost, gradients that are 0 in
    fp16.

    Threads that the region starts are not watched, nor is what happens in other processes; compiled functions
    run eagerly. Each op waits for the device: use it to look for a fault, not to train. With several ranks,
    the error of one leaves the others waiting in their next collective until its process ends: let it end, or
    use ``keep_going``, which stops none.

    Args:
        model: gives the module and parameter names; default: whatever module is called, its class in front.
        keep_going: collect findings instead of raising at the first.
        strict: report an infinity or a nan at once, also if nothing comes of it.

    Returns:
        A context manager; ``findings`` holds what was found, ``report()`` is its text.

    Raises:
        NonFiniteError: in the region or at its end, unless ``keep_going``; a FloatingPointError.

    Example:
        >>> with diagnose(keep_going=True) as diagnosis:
        ...     y = torch.zeros(2).log().sum() * 0
        >>> diagnosis.findings[0].op
        'aten::log.default'
    """
    return Diagnosis(model, keep_going=keep_going, strict=strict)
