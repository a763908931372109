"""Find the first op that makes a nan or inf which matters, or the reason why a model does not learn."""

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
    """A region in which every op is watched. See ``diagnose``.

    Attributes:
        findings: The findings, in order. Without ``keep_going`` there is one at most. With it, findings of
            the same op and line are one finding with a count.
        read: Nans and infs that reached no loss, gradient or weight, but that Python has read (a metric, for
            example) or by which an op such as argmin has selected. One for each op and line.
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
        self._known: dict[tuple[object, ...], int] = {}  # maps the subject of a finding to its index
        tracker = Tracker(model)
        self._watch = Watch(tracker, self._found, strict=strict, patience=patience)
        self._learning = Learning(tracker)
        self._formats = FormatLog(tracker)
        self._refused: Refused | None = None  # the last op for which torch raised an error on dtypes
        super().__init__(tracker, self._watch, self._learning, self._formats, self)

    def open(self, stack: ExitStack) -> None:
        """Also watch torch's functions that clip gradients."""
        stack.enter_context(ScaledClips(self._found))

    def failed(self, call: Call, error: BaseException) -> None:
        """Find out whether an op raised an error because of its dtypes."""
        self._refused = refused(self.tracker, call, error) or self._refused

    def ended(self, error: BaseException | None) -> None:
        """Report the remaining nans and infs. If there are no findings, find out why nothing is learnt."""
        last, self._refused = self._refused, None  # drop the error, because it keeps frames alive
        if error is None or isinstance(error, SystemExit):
            self.tracker.ends()
            self._raises = self._raises and error is None
            with unwatched():
                self._watch.left_over()
            for finding in self._learning.findings() if not self.findings else ():
                self._found(finding)
        elif not isinstance(error, NonFiniteError):
            self._raises = False  # so that the program's own error is raised
            with unwatched():
                for finding in findings_at_end(self.tracker, last, error):
                    self._found(finding)
        self.read = [*{_about(finding): finding for finding in self._watch.read_elsewhere()}.values()]

    def report(self) -> str:
        """Return all findings as text. Without findings, say so, and say what could not be watched."""
        below = [f"{layer}, {operand}: {found}" for (layer, operand), found in self._formats.ranges().items()]
        if self.findings:
            return "\n\n".join([*map(str, self.findings), *filter(None, ["\n".join(below)])])
        lines = ["every number that mattered was finite"]
        if self.read:
            lines = ["every number that reached a loss, a gradient or a weight was finite", *self.notes()]
        if not self.tracker.backward_passes and not self.tracker.steps:
            lines.append("no backward pass and no optimizer step was seen: only forward passes were checked")
        lines += below
        if unseen := self.unseen:
            lines.append(f"not watched inside, or not run in a wider dtype: {listed(unseen)}")
        if self.has_compiled:
            lines.append(
                "compiled functions ran eagerly; `amp-plugin diagnose --compare eager` compares them"
            )
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return a line for each entry of ``read``, and the command that stops at the first of them."""
        if not self.read:
            return []
        lines = [f"  {found.headline}, at {found.place}: {found.reached}" for found in self.read]
        return [
            "these numbers were not finite, and were read outside training:",
            *lines,
            "`amp-plugin diagnose --strict train.py` stops at the first of them and says what to do",
        ]

    def _found(self, finding: Finding) -> None:
        """Add a finding, or count it if one with the same op and line is known."""
        finding = replace(finding, format=self._formats.format_of(finding.module))
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
    """Return the subject of a finding. Findings with the same subject count as one."""
    return finding.kind, finding.op, finding.forward_op, finding.place, finding.cause, finding.lesson


def diagnose(model: nn.Module | None = None, *, keep_going: bool = False, strict: bool = False) -> Diagnosis:
    """Watch every op of a region, and raise an error at the first nan or inf that matters.

    The forward pass, the backward pass and the optimizer step are watched, in any precision, with or without
    autocast. The error names the op, the module, the line, the cause, the dtype, the op rule, the ranges of
    the inputs, and what to do.

    A nan or inf matters if it reaches a loss, a gradient, a weight or the state of an optimizer. So a mask of
    -inf raises no error, nor does a number that a later op removes. If the region has no backward pass, a nan
    or inf matters if it is still there at the end. If all numbers are finite, the region is checked for
    reasons why nothing is learnt: no optimizer step, updates lost to rounding in the weight's dtype,
    gradients that are 0 in fp16.

    Each op waits for the device, so use this to find a fault and not to train. Compiled functions run
    eagerly. Threads and processes that the region starts are not watched. With several ranks, an error on one
    rank leaves the others waiting in their next collective until its process ends. Let the process end, or
    use ``keep_going``.

    Args:
        model: The model, which gives the names of modules and parameters. By default names begin with the
            class of the outermost module that is called.
        keep_going: Collect findings instead of raising an error at the first one.
        strict: Report every nan and inf at once, even if it would not matter.

    Returns:
        A context manager. ``findings`` holds the findings, and ``report()`` returns them as text.

    Raises:
        NonFiniteError: In the region or at its end, unless ``keep_going``. It is a FloatingPointError.

    Example:
        >>> with diagnose(keep_going=True) as diagnosis:
        ...     y = torch.zeros(2).log().sum() * 0
        >>> diagnosis.findings[0].op
        'aten::log.default'
    """
    return Diagnosis(model, keep_going=keep_going, strict=strict)
