"""Find the first op that makes a number which is not finite, in a region of a program."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torch import nn

from amp_plugin.numerics.finding import Finding, NonFiniteError
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_region import OpRegion
from amp_plugin.numerics.progress import Progress
from amp_plugin.numerics.watch import Watch


class Diagnosis(OpRegion):
    """A region in which every op is watched; see ``diagnose``.

    Args:
        model: as for ``diagnose``.
        keep_going: as for ``diagnose``.
        strict: as for ``diagnose``.
        on_finding: called with each finding as soon as it is found.

    Attributes:
        findings: what was found, in order; one at most unless ``keep_going``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        keep_going: bool = False,
        strict: bool = False,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self._on_finding = on_finding or _ignore
        self._raises = not keep_going
        progress = Progress()
        modules = ModulePaths(model, progress.called)
        self._watch = Watch(modules, progress, self._found, self._amended, strict=strict)
        super().__init__(self._watch, progress)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching.

        Raises:
            NonFiniteError: an infinity is left, and nothing was found before.
        """
        super().__exit__(kind, error, traceback)
        if error is None or isinstance(error, SystemExit):
            self._raises = self._raises and error is None
            self._watch.left_over()

    def report(self) -> str:
        """Return all findings as text; says so if there is none, and which infinities came to nothing."""
        if self.findings:
            return "\n\n".join(map(str, self.findings))
        harmless = [f"\n{_in_one_line(finding)}" for finding in self._watch.harmless()]
        return "every number that mattered was finite" + "".join(harmless)

    def _amended(self, before: Finding, after: Finding) -> None:
        """Take a finding with its consequences in place of what was found first."""
        self.findings[:] = [after if finding is before else finding for finding in self.findings]

    def _found(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._on_finding(finding)
        if self._raises:
            raise NonFiniteError(finding)


def _in_one_line(finding: Finding) -> str:
    place = f" at {finding.place}" if finding.place else ""
    return f"{finding.headline}{place}; no nan came of it, but x / inf is 0; strict reports it"


def _ignore(finding: Finding) -> None:
    """Do nothing with a finding: it is in ``findings``."""


def diagnose(model: nn.Module | None = None, *, keep_going: bool = False, strict: bool = False) -> Diagnosis:
    """Watch every op of a region and stop at the first one that makes a nan or a harmful infinity.

    Forward, backward and optimizer step, in any precision, with autocast or without. The error names op,
    module, line, dtype, rule, the ranges of the inputs, and what to do. An infinity is followed until a nan
    comes of it or it reaches a loss, a gradient, a weight or a Python number: masks of -inf and
    infinities that vanish again raise nothing. Threads that the region starts are not watched, nor is
    what happens in other processes; compiled functions run eagerly. Each op waits for the device: use it to
    look for a fault, not to train. With several ranks the error of one leaves the others waiting in their
    next collective until its process ends: let it end, or use ``keep_going``, which stops none.

    Args:
        model: gives the module and parameter names; default: whatever module is called, its class in front.
        keep_going: collect findings instead of raising at the first.
        strict: report an infinity at once, also if nothing comes of it.

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
