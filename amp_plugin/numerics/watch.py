"""The dispatch mode that looks at every result, and at the inputs of those that are not finite."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from amp_plugin.numerics.call_report import CallReport
from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.forward_sites import Site
from amp_plugin.numerics.judgement import GivenTensor, Judgement, given_before, judge, related
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import Argument, made_by
from amp_plugin.numerics.op_mode import OpMode
from amp_plugin.numerics.op_traits import OpTraits
from amp_plugin.numerics.origin import ON_PURPOSE, Origin
from amp_plugin.numerics.progress import Progress
from amp_plugin.numerics.scaled_gradients import ScaledGradients
from amp_plugin.numerics.storages import Storages
from amp_plugin.numerics.tensor_summary import is_finite, non_finite
from amp_plugin.numerics.unwatched import unwatched

_LOSS = "aten::ones_like.default"  # autograd's first op: the gradient of the loss
_ORDERS = frozenset({"ord", "p", "norm_type"})
_TO_PYTHON = "aten::_local_scalar_dense.default"


class Watch(OpMode):  # type: ignore[no-untyped-call]
    """Watch the ops of this thread and of the backward passes it starts.

    An infinity is followed, since many come to nothing: exp(-inf) is 0. It matters once a nan comes of it,
    or it reaches a loss, a gradient, a weight or a Python number. A nan matters at once.

    Args:
        modules: knows which module runs; open.
        progress: counts passes and optimizer steps; open.
        found: called with each finding that matters; may raise to end the program there.
        amended: called with a finding that was found before, and the same with one consequence more.
        strict: an infinity matters at once, too.
    """

    def __init__(
        self,
        modules: ModulePaths,
        progress: Progress,
        found: Callable[[Finding], None],
        amended: Callable[[Finding, Finding], None],
        *,
        strict: bool,
    ) -> None:
        super().__init__(modules)
        self._progress = progress
        self._found = found
        self._amended = amended
        self._strict = strict
        self._scaled = ScaledGradients()
        self._origins: Storages[Origin] = Storages()
        self._first_at: dict[int, Origin] = {}  # by the id of its site, which it keeps alive
        self._forward: dict[object, Origin] = {}  # the first origin made by each line of a forward pass
        self._unjudged: Storages[Site] = Storages()  # memory nobody wrote, and what collectives brought

    def run_op(self, func: OpOverload, traits: OpTraits, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the op, and look at what it made."""
        report = CallReport(traits, args, kwargs, self.modules, self.sites, self._progress)
        if report.is_backward:
            self._scaled.enter(torch._C._current_graph_task_id(), self._origins.alive)
            self._progress.in_backward(torch._C._current_graph_task_id())
        with unwatched():
            self._arrive(report)
            before = given_before(report.arguments, traits) if traits.written else []
        try:
            output = func(*args, **kwargs)
        except Exception:  # it is raised again; what led to it is reported before
            with unwatched():
                self._refused(report)
            raise
        if not traits.is_view:
            with unwatched():
                self._look(report, before, output)
        return output

    def left_over(self) -> None:
        """Report the infinities that nothing has come of, but that are still there, and not on purpose."""
        self._scaled.close(self._origins.alive)
        if (overflow := self._scaled.last) is not None:
            passes = f"{self._scaled.passes} backward passes" if self._scaled.passes > 1 else "backward pass"
            self._report(overflow, f"gradients that are not finite, in the last {passes}")
        left: dict[object, list[Origin]] = {}
        for origin in dict.fromkeys(self._origins.alive()):
            if origin.is_accident and not (origin.is_scaled_gradient or origin.is_reported):
                left.setdefault(_line_of(origin), []).append(origin)
        for first, *others in left.values():
            more = f", and {len(others)} more that this line made" if others else ""
            self._report(first, f"still there at the end of the region{more}")

    def harmless(self) -> list[Finding]:
        """Return for each line of forward passes that made infinities the first, if nothing came of any."""
        return [origin.finding for origin in self._forward.values() if origin.finding is not None]

    def _arrive(self, report: CallReport) -> None:
        """Report what has reached a loss, a gradient or a Python number by this op."""
        for argument in report.arguments:
            origin = self._origins.get(argument.tensor)
            if origin is None or origin is ON_PURPOSE or origin.is_reported:
                continue
            if self._is_waiting(origin):
                if report.accumulates and (first := self._scaled.overflow(origin)) is not None:
                    self._report(
                        first, f"gradients that are not finite, in {self._scaled.passes} backward passes"
                    )
            elif report.traits.name == _TO_PYTHON:
                self._report(origin, "a number in Python (item, float, print)")
            elif report.traits.name == _LOSS and _is_called_by_autograd(sys._getframe()):
                self._report(origin, "the loss, of which a backward pass begins")
            elif report.accumulates:
                leaf = report.node.variable  # type: ignore[attr-defined]
                self._report(origin, f"the gradient of {report.weight(leaf) or 'a leaf'}")

    def _refused(self, report: CallReport) -> None:
        """Report what was in the arguments of an op that raised an error."""
        for argument in report.arguments:
            origin = self._origins.get(argument.tensor)
            if origin is not None:
                self._report(origin, f"an error of {report.here()}")

    def _look(self, report: CallReport, before: list[GivenTensor], output: Any) -> None:
        """Look at the results, and at the arguments that were written."""
        results = made_by(report.traits, report.arguments, output)
        for position in report.traits.partly_unwritten:
            self._origins.forget(output[position])
            self._unjudged.set(output[position], report.site())
        if report.traits.is_unwritten or report.traits.is_collective:
            sent = self._sent(report)
            for result in results:
                self._origins.forget(result.tensor)
                self._unjudged.set(result.tensor, report.site())
                if sent is not None:
                    self._origins.set(result.tensor, sent)
            return
        given: list[GivenTensor] | None = None
        for result in results:
            if is_finite(result.tensor):
                self._origins.forget(result.tensor)
                self._unjudged.forget(result.tensor)
                continue
            given = given or self._given(report, before)
            self._trace(report, result, related(result, given, report.traits))

    def _sent(self, report: CallReport) -> Origin | None:
        """Return the origin of what this rank itself sends to the others; None if that is finite."""
        arguments = report.arguments if report.traits.is_collective else []
        origins = (self._origins.get(argument.tensor) for argument in arguments)
        return next((origin for origin in origins if origin is not None and origin is not ON_PURPOSE), None)

    @staticmethod
    def _given(report: CallReport, before: list[GivenTensor]) -> list[GivenTensor]:
        """Return all arguments as they were before the op."""
        known = {argument.label for argument in (tensor.argument for tensor in before)}
        read = [argument for argument in report.arguments if argument.label not in known]
        return [
            *before,
            *(GivenTensor(argument=argument, held=non_finite(argument.tensor)) for argument in read),
        ]

    def _trace(self, report: CallReport, result: Argument, given: list[GivenTensor]) -> None:
        """Find the origin of a result that is not finite, note it, and report it if it matters."""
        judged = judge(result, given, report.traits, _constants(report))
        if judged.verdict in {"on purpose", "masked"}:
            origin, what = ON_PURPOSE, ""
        elif judged.verdict == "made":
            origin, what = self._made(report, result, judged)
        else:
            origin, what = self._passed_on(report, result, judged)
        self._origins.set(result.tensor, origin)
        self._unjudged.forget(result.tensor)
        if origin is ON_PURPOSE or origin.is_reported:
            return
        written = report.weight(result.tensor) if result.name and not report.is_backward else ""
        if written and report.traits.written:
            what = what or f"the weight {written}, written by {report.here()}"
        elif self._is_waiting(origin):
            if report.is_backward:
                self._scaled.suspect(origin)
            return
        elif report.is_backward:
            what = what or f"the gradients, by {report.here()}"
        if what or self._strict or (judged.verdict == "made" and judged.values.nan):
            self._report(origin, what)

    def _is_waiting(self, origin: Origin) -> bool:
        """Whether it is a fault only after several backward passes in a row."""
        return origin.is_scaled_gradient and not self._strict

    def _made(self, report: CallReport, result: Argument, judged: Judgement) -> tuple[Origin, str]:
        """Return the origin of numbers an op made, which is an earlier one if that explains them."""
        for given in judged.of:
            origin = self._origins.get(given.argument.tensor)
            if origin is not None and origin.is_accident:
                return origin, f"{judged.values} in {report.here()}"
        finding = report.finding("made", result.tensor, judged.values)
        if not report.is_backward:
            origin = Origin("made", finding, self.sites.latest(report.site()))
            self._forward.setdefault(_line_of(origin), origin)
            return origin, ""
        site = self.sites.of(report.node)
        first = self._first_at.get(id(site))
        if first is not None and first.is_reported:
            self._add_consequence(first, finding.headline)
            return first, ""
        origin = Origin("made", finding, site)
        if site is not None:
            self._first_at.setdefault(id(site), origin)
        return origin, self._beside(finding)

    def _add_consequence(self, origin: Origin, headline: str) -> None:
        """Tell of a derivative at the point where the op itself was not finite as part of that finding."""
        before = origin.finding
        if before is not None and headline not in {before.headline, *before.consequences}:
            origin.finding = replace(before, consequences=(*before.consequences, headline))
            self._amended(before, origin.finding)

    def _beside(self, finding: Finding) -> str:
        """Say what a gradient's fault reaches, and what was infinite before it."""
        reached = f"the gradients of {finding.forward_op}"
        waiting = [
            o.finding for o in self._origins.alive() if o.is_accident and not o.is_reported and o.finding
        ]
        return f"{reached}; still there from before: {waiting[0].headline}" if waiting else reached

    def _passed_on(self, report: CallReport, result: Argument, judged: Judgement) -> tuple[Origin, str]:
        """Return the origin of numbers that came in, and what they reached if this op computes with them."""
        origins = [(given, self._origins.get(given.argument.tensor)) for given in judged.of]
        accidents = [origin for _, origin in origins if origin and origin.is_accident]
        given, origin = origins[0]
        if accidents and not given.held.nan:
            return accidents[0], ""
        if origin is None:
            origin = self._came_in(report, result, given)
            if not given.was_written:
                self._origins.set(given.argument.tensor, origin)
        computes = not report.traits.moves and origin.waits_for_arithmetic
        return origin, f"{judged.values} in {report.here()}" if computes else ""

    def _came_in(self, report: CallReport, result: Argument, given: GivenTensor) -> Origin:
        """Return the origin of numbers that no watched op made."""
        argument = given.argument
        made = self._unjudged.get(argument.tensor)
        if made is not None:
            kind: Kind = "collective" if made.op.startswith(("c10d", "_c10d")) else "unwritten"
            return Origin(kind, report.finding(kind, result.tensor, given.held, argument, made))
        if report.weight(argument.tensor):
            return Origin("weight", report.finding("weight", result.tensor, given.held, argument))
        if given.held.nan:
            return Origin("input", report.finding("input", result.tensor, given.held, argument))
        return ON_PURPOSE  # a mask that was made before

    def _report(self, origin: Origin, reached: str) -> None:
        if not origin.is_reported and origin.finding is not None:
            origin.is_reported = True
            origin.finding = replace(origin.finding, reached=reached, consequences=self._beside_it(origin))
            self._found(origin.finding)

    def _beside_it(self, origin: Origin) -> tuple[str, ...]:
        """Return what the backward pass of the same op has made before: it is no finding of its own then."""
        if origin.site is None:
            return ()
        first = self._first_at.get(id(origin.site), origin)
        self._first_at[id(origin.site)] = origin
        if first.is_reported or first.finding is None:
            return ()
        first.is_reported = True
        is_other = origin.finding is None or first.finding.headline != origin.finding.headline
        return (first.finding.headline,) if is_other else ()  # two gradients of one op


def _line_of(origin: Origin) -> object:
    """Return what the same op in the same line, as in a loop, has in common."""
    found = origin.finding
    return origin if found is None else (found.op, found.module, found.place)


def _constants(report: CallReport) -> list[float]:
    """Return the numbers the caller gave as values; the inf of a norm's order is none."""
    return [number for name, number in report.scalars.items() if name not in _ORDERS]


def _is_called_by_autograd(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is torch.autograd._make_grads.__code__:
            return True
        frame = frame.f_back
    return False
