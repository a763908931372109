"""Follow numbers that are not finite from where they come from to a loss, a gradient or a weight.

for each op: look at the results
    finite: what came in is absorbed; the storage holds nothing odd any more
    else: judge whether the op made it, passes it on, or a constant of the program put it there on purpose
report an origin when its numbers reach the start of a backward pass, a leaf's gradient, a result of
autograd.grad, a
    parameter or an optimizer's state; torch masks what its own derivatives make, and masks are masks
at the end, of a region without a backward pass: report what nothing has hidden
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.judge import GivenTensor, Judgement, given_before, judge, related
from amp_plugin.numerics.op import Argument, Call, made_by
from amp_plugin.numerics.places import Site
from amp_plugin.numerics.report import Reporter
from amp_plugin.numerics.values import Storages, is_finite, non_finite

OriginKind = Literal[
    "made", "weight", "input", "unwritten", "collective", "constant", "function", "learning", "on purpose"
]

PATIENCE = 20  # backward passes in a row: from 2^16 the scale is below 1 then
_ORDERS = frozenset({"ord", "p", "norm_type"})
_TO_PYTHON = "aten::_local_scalar_dense.default"
_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})


class Origin:
    """The origin of numbers that are not finite, shared by every tensor they were passed on to.

    Attributes:
        kind: as in ``Finding``; ``"on purpose"`` needs no finding.
        finding: what to report.
        site: of the op that made it, the same object for the op's backward pass; None if that is not known.
        is_reported: Whether it was reported; what follows from it is not reported again.
        is_read: an op has computed with it; moving it about does not count.
        is_absorbed: an op has made finite numbers of it.
        became_nan: an op has made a nan of it.
        in_python: Python has read it.
        source: of data: where it was loaded.
        others: origins whose numbers were in the same arithmetic; they arrive where it does.
    """

    def __init__(self, kind: OriginKind, finding: Finding | None = None, site: Site | None = None) -> None:
        self.kind, self.finding, self.site = kind, finding, site
        self.is_reported = self.is_read = self.is_absorbed = False
        self.became_nan = self.in_python = False
        self.source = ""
        self.others: dict[Origin, None] = {}

    @property
    def explains(self) -> bool:
        """Whether it is a fault, and so the reason of what arithmetic makes of it."""
        return self.kind not in {"on purpose", "constant"}

    @property
    def is_scaled_gradient(self) -> bool:
        """Whether it is a gradient in fp16 that overflowed, as a loss scale that is too large makes it."""
        found = self.finding
        return (
            self.kind == "made"
            and found is not None
            and found.direction == "backward"
            and found.dtype is torch.float16
            and not found.values.nan
        )


ON_PURPOSE = Origin("on purpose")


class ScaledGradients:
    """Backward passes whose fp16 gradients overflowed, one after the other: a few find the loss scale."""

    def __init__(self) -> None:
        self._task, self._in_a_row, self._overflowed = -1, 0, False
        self._first: Origin | None = None

    def enter(self, task: int) -> None:
        """Start the backward pass of a number, if it is a new one."""
        if task != self._task:
            if not self._overflowed:
                self._first, self._in_a_row = None, 0
            self._task, self._overflowed = task, False

    def overflow(self, origin: Origin) -> Origin | None:
        """Record that an overflow reached a gradient; return the first of the row once it is too long."""
        if not self._overflowed:
            self._overflowed, self._in_a_row = True, self._in_a_row + 1
            self._first = self._first or origin
        return self._first if self._in_a_row >= PATIENCE else None

    @property
    def passes(self) -> int:
        """How many passes in a row overflowed, the last one included."""
        return self._in_a_row if self._overflowed else 0

    @property
    def last(self) -> Origin | None:
        """The first overflow of the present row; None if the last pass had none."""
        return self._first if self._overflowed else None


class Watch:
    """The observer of ``diagnose``.

    Args:
        reporter: describes calls.
        found: called with each finding that matters; may raise to end the program there.
        amended: called with a finding that was found before, and the same with one consequence more.
        strict: an infinity or a nan matters as soon as it is made.
    """

    def __init__(
        self,
        reporter: Reporter,
        found: Callable[[Finding], None],
        amended: Callable[[Finding, Finding], None],
        *,
        strict: bool,
    ) -> None:
        self._reporter, self._found, self._amended, self._strict = reporter, found, amended, strict
        self._scaled = ScaledGradients()
        self._origins: Storages[Origin] = Storages()
        self._seen: list[Origin] = []
        self._first_at: dict[int, Origin] = {}  # by the id of its site, which it keeps alive
        self._unjudged: Storages[Site] = Storages()  # memory nobody wrote, and what collectives brought

    # -- an op ---------------------------------------------------------------------------------------------

    def before(self, call: Call) -> None:
        """Report what has reached a gradient, and read what the op is going to write."""
        if call.is_backward:
            task = torch._C._current_graph_task_id()
            self._scaled.enter(task)
            self._reporter.progress.in_backward(task)
        for argument in call.arguments:
            origin = self._origins.get(argument.tensor)
            if origin is None or origin is ON_PURPOSE:
                continue
            if call.accumulates:
                self._reaches_gradient(
                    origin, f"the gradient of {self._reporter.weight(call.leaf) or 'a leaf'}"
                )
            elif call.traits.name == _TO_PYTHON:
                origin.in_python = True
        call.kept = given_before(call.arguments, call.traits) if call.traits.written else []

    def failed(self, call: Call) -> None:
        """Report what was in the arguments of an op that raised an error."""
        for argument in call.arguments:
            if (origin := self._origins.get(argument.tensor)) is not None:
                self._report(origin, f"an error of {call.here()}")

    def after(self, call: Call, output: Any) -> None:
        """Look at the results, and at the arguments that were written."""
        traits = call.traits
        if traits.is_view:
            return
        results = made_by(traits, call.arguments, output)
        for position in traits.partly_unwritten:
            self._origins.forget(output[position])
            self._unjudged.set(output[position], call.site)
        if traits.is_unwritten or traits.is_collective:
            self._take_unjudged(call, results)
            return
        given: list[GivenTensor] | None = None
        for result in results:
            if is_finite(result.tensor):
                self._origins.forget(result.tensor)
                self._unjudged.forget(result.tensor)
                continue
            given = given or self._given(call)
            self._trace(call, result, related(result, given, traits))
        if results and given is None:
            self._absorb(call)

    def _absorb(self, call: Call) -> None:
        for argument in call.arguments:
            origin = self._origins.get(argument.tensor)
            if origin is not None:
                origin.is_absorbed = True

    def _take_unjudged(self, call: Call, results: Sequence[Argument]) -> None:
        """Record memory that nobody wrote, or another rank; what this rank sent is its own."""
        arguments = call.arguments if call.traits.is_collective else []
        origins = (self._origins.get(argument.tensor) for argument in arguments)
        sent = next((origin for origin in origins if origin not in {None, ON_PURPOSE}), None)
        for result in results:
            self._origins.forget(result.tensor)
            self._unjudged.set(result.tensor, call.site)
            if sent is not None:
                self._origins.set(result.tensor, sent)

    @staticmethod
    def _given(call: Call) -> list[GivenTensor]:
        """Return all arguments as they were before the op."""
        known = {tensor.argument.label for tensor in call.kept}
        read = [argument for argument in call.arguments if argument.label not in known]
        return [
            *call.kept,
            *(GivenTensor(argument=argument, held=non_finite(argument.tensor)) for argument in read),
        ]

    def _trace(self, call: Call, result: Argument, given: list[GivenTensor]) -> None:
        """Find the origin of a result that is not finite, and report it if it has reached a weight."""
        numbers = [number for name, number in call.scalars.items() if name not in _ORDERS]
        judged = judge(result, given, call.traits, numbers)
        match judged.verdict:
            case "on purpose" if judged.values.nan:
                origin = self._new("constant", call, result, judged)
            case "on purpose" | "masked":
                origin = ON_PURPOSE
            case "made":
                origin = self._made(call, result, judged)
            case _:
                origin = self._passed_on(call, result, judged)
        self._origins.set(result.tensor, origin)
        self._unjudged.forget(result.tensor)
        if origin.is_reported or not origin.explains:
            return
        owner = self._reporter.weight(result.tensor) if call.traits.written and not call.is_backward else ""
        if origin.kind == "collective" and not call.traits.moves:
            self._report(origin, f"{judged.values} in {call.here()}")
        elif owner and result.name and isinstance(result.tensor, nn.Parameter):
            if origin.kind == "input" and call.traits.moves:
                origin.kind = "weight"  # loaded so: it matters once it is used
                return
            self._report(origin, f"the weight {owner}, written by {call.here()}")
        elif self._strict and judged.verdict == "made":
            self._report(origin, "")

    # -- origins -------------------------------------------------------------------------------------------

    def _new(self, kind: Kind, call: Call, result: Argument, judged: Judgement) -> Origin:
        return self._keep(Origin(kind, self._reporter.finding(call, kind, result.tensor, judged.values)))

    def _keep(self, origin: Origin) -> Origin:
        self._seen.append(origin)
        return origin

    def _made(self, call: Call, result: Argument, judged: Judgement) -> Origin:
        """Return the origin of numbers an op made, which is an earlier one if that explains them."""
        if call.traits.base not in _SOFTMAXES or any(given.held.posinf for given in judged.of):
            for given in judged.of:
                origin = self._origins.get(given.argument.tensor) or self._came_in(call, result, given)
                if origin.explains:
                    self._read(origin, call, result, given)
                    self._then(origin, f"{judged.values} in {call.here()}")
                    return origin
        finding = self._reporter.finding(call, "made", result.tensor, judged.values)
        if not call.is_backward:
            return self._keep(Origin("made", finding, call.recorded_site))
        site = call.forward_site
        first = self._first_at.get(id(site))
        if first is not None and first.is_reported:
            self._add_consequence(first, finding.headline)
            return first
        origin = self._keep(Origin("made", finding, site))
        if site is not None:
            self._first_at.setdefault(id(site), origin)
        return origin

    def _then(self, origin: Origin, what: str) -> None:
        """Record the first nan that came of an infinity."""
        origin.became_nan = True
        if origin.finding is not None and not origin.finding.reached:
            origin.finding = replace(origin.finding, reached=what)

    def _add_consequence(self, origin: Origin, headline: str) -> None:
        """Add a derivative at the point where the op itself was not finite to that finding."""
        before = origin.finding
        if before is not None and headline not in {before.headline, *before.consequences}:
            origin.finding = replace(before, consequences=(*before.consequences, headline))
            self._amended(before, origin.finding)

    def _passed_on(self, call: Call, result: Argument, judged: Judgement) -> Origin:
        """Return the origin of numbers that came in."""
        origins = [(given, self._origins.get(given.argument.tensor)) for given in judged.of]
        faults = [
            (given, origin)
            for given, origin in origins
            if origin is not None and origin.explains and (origin.kind == "made" or given.held.nan)
        ]
        if faults:
            (given, origin), *others = faults
            origin.others |= {other: None for _, other in others if other is not origin}
            self._read(origin, call, result, given)
            return origin
        given, known = origins[0]
        origin = known or self._came_in(call, result, given)
        if known is None and not given.was_written:
            self._origins.set(given.argument.tensor, origin)
        self._read(origin, call, result, given)
        return origin

    def _read(self, origin: Origin, call: Call, result: Argument, given: GivenTensor) -> None:
        """Let the finding of what came in show the first op that computes with it."""
        tensor = given.argument.tensor
        origin.source = origin.source or self._reporter.source(tensor) or self._reporter.weight(tensor)
        if origin.is_read or origin.kind not in {"weight", "input"} or call.traits.moves:
            return
        origin.is_read = True
        kind: Kind = "weight" if origin.kind == "weight" else "input"
        origin.finding = self._reporter.finding(
            call, kind, result.tensor, given.held, given.argument, source=origin.source
        )

    def _came_in(self, call: Call, result: Argument, given: GivenTensor) -> Origin:
        """Return the origin of numbers that no watched op made."""
        argument = given.argument
        made = self._unjudged.get(argument.tensor)
        if made is not None:
            kind: Kind = "collective" if made.op.startswith(("c10d", "_c10d")) else "unwritten"
        else:
            is_weight = self._reporter.weight(argument.tensor)
            kind = (
                "weight" if is_weight else "function" if self._reporter.function(argument.tensor) else "input"
            )
        source = self._reporter.source(argument.tensor)
        finding = self._reporter.finding(call, kind, result.tensor, given.held, argument, made, source=source)
        return self._keep(Origin(kind, finding))

    # -- where numbers arrive --------------------------------------------------------------------------------

    def backward_begins(self, outputs: Sequence[object]) -> None:
        """Report what is in the losses that a backward pass starts from."""
        for loss in outputs:
            origin = self._origins.get(loss) if isinstance(loss, Tensor) else None
            if origin is not None:
                self._report(origin, "the loss, of which a backward pass begins")

    def backward_ended(self, gradients: Sequence[Tensor | None] | None) -> None:
        """Report what is in the gradients that a backward pass returned."""
        for gradient in gradients or ():
            origin = None if gradient is None else self._origins.get(gradient)
            if origin is not None:
                self._reaches_gradient(origin, "a gradient that autograd.grad returned")

    def function_ended(self, site: Site, inputs: object, outputs: object) -> None:
        """Take what a user's autograd function made outside of torch's ops."""
        for output in _tensors(outputs):
            if self._origins.get(output) is not None or is_finite(output):
                continue
            passed = (self._origins.get(tensor) for tensor in _tensors(inputs))
            origin = next((origin for origin in passed if origin is not None and origin.explains), None)
            if origin is None:
                found = self._reporter.of_function(site, output, list(_tensors(inputs)))
                origin = self._keep(Origin("function", found))
            self._origins.set(output, origin)

    def state_written(self, name: str, states: Mapping[str, object]) -> None:
        """Report what an optimizer's step has left in its state."""
        for key, state in states.items():
            origin = self._origins.get(state) if isinstance(state, Tensor) else None
            if origin is not None and origin.explains:
                self._report(origin, f"the state {key} of {name}")

    def left_over(self) -> None:
        """Report the gradients of the last pass, and without any pass what nothing has hidden."""
        if (overflow := self._scaled.last) is not None and not overflow.is_absorbed:
            passes = f"{self._scaled.passes} backward passes" if self._scaled.passes > 1 else "backward pass"
            self._report(overflow, f"gradients that are not finite, in the last {passes}")
        if self._reporter.progress.has_backward:
            return
        alive = {id(origin) for origin in self._origins.alive()}
        left: dict[object, list[Origin]] = {}
        for origin in self._unreported():
            is_nan = origin.became_nan or origin.finding.values.nan  # type: ignore[union-attr]
            held = is_nan or id(origin) in alive
            if origin.explains and (origin.in_python or (held and not origin.is_absorbed)):
                left.setdefault(_line_of(origin), []).append(origin)
        for first, *others in left.values():
            more = f", and {len(others)} more that this line made" if others else ""
            what = (
                "a number in Python (item, float, print)"
                if first.in_python
                else "still there at the end of the region"
            )
            self._report(first, f"{what}{more}")

    def harmless(self) -> list[Finding]:
        """Return for each line of forward passes the first number that is not finite and has not mattered."""
        lines: dict[object, Finding] = {}
        for origin in self._unreported():
            found = origin.finding
            if found is not None and origin.kind == "made" and found.direction == "forward":
                lines.setdefault(_line_of(origin), found)
        return list(lines.values())

    def _unreported(self) -> Iterator[Origin]:
        return (origin for origin in self._seen if not origin.is_reported and origin.finding is not None)

    def _reaches_gradient(self, origin: Origin, what: str) -> None:
        if not origin.is_scaled_gradient or self._strict:
            self._report(origin, what)
        elif (first := self._scaled.overflow(origin)) is not None:
            self._report(first, f"gradients that are not finite, in {self._scaled.passes} backward passes")

    def _report(self, origin: Origin, reached: str) -> None:
        if not origin.is_reported and origin.finding is not None:
            origin.is_reported = True
            then = "; ".join(filter(None, (origin.finding.reached, reached)))
            origin.finding = replace(origin.finding, reached=then, consequences=self._of_the_same_op(origin))
            self._found(origin.finding)
            for other in origin.others:
                self._report(other, reached)

    def _of_the_same_op(self, origin: Origin) -> tuple[str, ...]:
        """Return what the backward pass of the same op has made before, which is part of this finding."""
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


def _tensors(values: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf
