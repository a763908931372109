"""Find the first op that produces a harmful nan or inf, or the reason why a model does not learn."""

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
    """The region that ``diagnose`` returns, in which every op is watched.

    Attributes:
        findings: The findings, in order. Without ``keep_going`` there is at most one finding. With
            ``keep_going``, repeated findings at the same op and line are merged into one finding with a
            count.
        read: Findings about nans and infs that reached no loss, gradient or weight, but were used elsewhere.
            For example, ``item()`` may return a nan for a metric, or an inf may decide which element argmin
            selects. There is one finding for each op and line.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        keep_going: bool = False,
        strict: bool = False,
        patience: int = PATIENCE,  # overflows in this many backward passes in a row are reported
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self.read: list[Finding] = []
        self._on_finding, self._raises = on_finding, not keep_going
        self._known: dict[tuple[object, ...], int] = {}  # maps each finding's key to its index
        tracker = Tracker(model)
        self._watch = Watch(tracker, self._found, strict=strict, patience=patience)
        self._learning = Learning(tracker)
        self._formats = FormatLog(tracker)
        self._refused: Refused | None = None  # the last op that raised an error about dtypes
        super().__init__(tracker, self._watch, self._learning, self._formats, self)

    def open(self, stack: ExitStack) -> None:
        """Also watch torch's functions that clip gradients."""
        stack.enter_context(ScaledClips(self._found))

    def failed(self, call: Call, error: BaseException) -> None:
        """Determine whether the dtypes of an op's inputs are the reason for its error."""
        self._refused = refused(self.tracker, call, error) or self._refused

    def ended(self, error: BaseException | None) -> None:
        """Report the remaining nans and infs. If there are no findings, check whether the model learns."""
        last, self._refused = self._refused, None  # the error is dropped, because it keeps frames alive
        if error is None or isinstance(error, SystemExit):
            self.tracker.ends()
            self._raises = self._raises and error is None
            with unwatched():
                self._watch.left_over()
            for finding in self._learning.findings() if not self.findings else ():
                self._found(finding)
        elif not isinstance(error, NonFiniteError):
            self._raises = False  # a finding must not replace the error that ended the program
            with unwatched():
                for finding in findings_at_end(self.tracker, last, error):
                    self._found(finding)
        self.read = [*{_about(finding): finding for finding in self._watch.read_elsewhere()}.values()]

    def report(self) -> str:
        """Return all findings as text. If there are no findings, also list the ops that were not watched."""
        below = [f"{layer}, {operand}: {found}" for (layer, operand), found in self._formats.ranges().items()]
        if self.findings:
            return "\n\n".join([*map(str, self.findings), *filter(None, ["\n".join(below)])])
        lines = ["no harmful nan or inf was found"]
        if self.read:
            lines = ["no nan or inf reached a loss, a gradient or a weight", *self.notes()]
        if not self.tracker.backward_passes and not self.tracker.steps:
            lines.append("no backward pass and no optimizer step was seen: only forward passes were checked")
        lines += below
        if unseen := self.unseen:
            lines.append(
                "not fully checked, because ops inside them are hidden or they do not run in a wider dtype: "
                f"{listed(unseen)}"
            )
        if self.has_compiled:
            lines.append(
                "compiled functions ran eagerly; `amp-plugin diagnose --compare eager train.py` compares "
                "compiled code with eager code"
            )
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return one line for each finding in ``read``, and the command that stops at the first finding."""
        if not self.read:
            return []
        lines = [f"  {found.headline}, at {found.place}: {found.reached}" for found in self.read]
        return [
            "these nans and infs reached no loss, gradient or weight, but were read outside training:",
            *lines,
            "`amp-plugin diagnose --strict train.py` stops at the first of them and says what to do",
        ]

    def _found(self, finding: Finding) -> None:
        """Add a finding, or increase the count of a finding with the same op and line."""
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
    """Return the key of a finding. Findings with equal keys are merged into one."""
    return finding.kind, finding.op, finding.forward_op, finding.place, finding.cause, finding.lesson


def diagnose(model: nn.Module | None = None, *, keep_going: bool = False, strict: bool = False) -> Diagnosis:
    """Watch every op of a region, and raise an error at the first harmful nan or inf.

    The forward pass, the backward pass and the optimizer step are watched, in any precision, with or without
    autocast. The error names the op, the module, the line, the cause, the dtype, the op rule and the ranges
    of the inputs. It also says what to do.

    A nan or inf is harmful if it reaches a loss, a gradient, a weight or the state of an optimizer. For
    example, a mask of -inf raises no error, and neither does a nan or inf that a later op replaces. In a
    region without a backward pass, a nan or inf is harmful if a tensor still contains it when the region
    ends.

    If there is no harmful nan or inf, ``diagnose`` looks for other reasons why a model may not learn. It
    reports a missing optimizer step, updates lost to rounding in the weight's dtype, and gradients that
    underflow to 0 in fp16.

    Each op waits for the device, so use this for debugging and not for training. Compiled functions run
    eagerly. Threads and processes that the region starts are not watched. If one of several ranks raises the
    error, the other ranks wait in their next collective until its process ends. In a run with several ranks,
    let an error from ``diagnose`` end the process, or use ``keep_going=True``.

    Args:
        model: The model from which names of modules and parameters are taken. By default, names begin with
            the class of the outermost module that is called.
        keep_going: Collect findings instead of raising an error at the first one.
        strict: Report every nan and inf where it arises, even if it is harmless.

    Returns:
        A context manager whose attribute ``findings`` holds the findings. The method ``report()`` returns all
        findings as text.

    Raises:
        NonFiniteError: There was a finding in the region or at its end, and ``keep_going`` is False. The
            error is a FloatingPointError.

    Example:
        >>> with diagnose(keep_going=True) as diagnosis:
        ...     y = torch.zeros(2).log().sum() * 0
        >>> diagnosis.findings[0].op
        'aten::log.default'
    """
    return Diagnosis(model, keep_going=keep_going, strict=strict)
