"""Trace each inf or nan from the op where it arose to a loss, a gradient or a weight.

for each op, look at its results

    if a result is finite, forget the inf or nan that was recorded for the memory of this result

    if an input was not finite but the result is, the op has absorbed the inf or nan

    if a result is not finite, determine which of three origins its inf or nan has

        the op produced the inf or nan from finite inputs

        an input contained the inf or nan, and the op passed it on

        the program wrote a constant, such as a mask of -inf

    report the origin when its inf or nan reaches a loss, a gradient, a parameter or an optimizer's state

at the end of a region that ran no backward pass, report each inf or nan that no op turned into finite numbers

An inf or nan in the result of a backward op is reported only if it reaches a gradient.
Torch's backward ops often replace an inf or nan from an earlier backward op with 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Final, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from amp_plugin.numerics.advise import SOFTMAXES, finding_of, finding_of_function
from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Argument, Call, OpTraits
from amp_plugin.numerics.places import Site
from amp_plugin.numerics.values import (
    Held,
    ShadowValues,
    Storages,
    is_finite,
    non_finite,
    real_values,
    storage_address,
    unwatched,
)

Verdict = Literal["made", "became nan", "on purpose", "masked", "passed on"]
"""Where the infs or nans of a result come from.

- ``"made"``: the op produced the inf or nan.
- ``"became nan"``: the op produced a nan from an inf in an input.
- ``"on purpose"``: the program gave the inf or nan as a constant.
- ``"masked"``: the op computed -inf from a large negative number, as is common in masks.
- ``"passed on"``: an input contained the inf or nan.
"""

# A number counts as a mask value if its magnitude is above this fraction of its dtype's largest number.
# In bf16 and fp32, this limit is about 1e38, which ordinary computations never reach.
# In fp16, activations and scaled gradients may come near 65504, the largest number of the dtype.
# In fp16, only magnitudes above 0.999 * 65504 therefore count as mask values.
_MASKING, _MASKING_IN_FP16 = 0.25, 0.999
# An overflow is reported if this many backward passes in a row overflow.
# After 20 overflows in a row, repeated halving has brought a loss scale of 2^16 below 1.
PATIENCE: Final = 20
_ORDERS = frozenset({"ord", "p", "norm_type"})
_SCALED = "made", "backward", torch.float16
_PYTHON, _SELECTION = "Python", "an op that selects elements, such as argmin"
_TO_PYTHON = "aten::_local_scalar_dense.default"
_READERS = ("numpy", "tolist", "__dlpack__")  # methods that read a tensor without calling the dispatcher
# Ops that select elements by size. An inf or nan may affect the selection but not appear in the result.
_SELECTING = frozenset(
    {"argmin", "argmax", "argsort", "sort", "topk", "min", "max", "kthvalue", "median", "nanmedian", "mode",
     "searchsorted", "bucketize", "multinomial"}
)  # fmt: skip


@dataclass(eq=False, slots=True)
class Origin:
    """The origin of an inf or nan.

    If an op passes the inf or nan on, the result of the op gets the same ``Origin`` object.
    """

    kind: Kind  # as in Finding
    # The finding to report. None for constants, and for unwritten memory that no op has read yet.
    finding: Finding | None = None
    # The call site of the op that produced the inf or nan.
    # If a backward op produced it, the call site of the corresponding forward op.
    site: Site | None = None
    is_reported: bool = False  # whether this origin was reported; no origin is reported twice
    is_read: bool = False  # whether an op has computed with the inf or nan; copies and views do not count
    is_absorbed: bool = False  # whether an op has computed finite numbers from the inf or nan
    is_compared: bool = False  # whether an op has computed integers or booleans from the inf or nan
    became_nan: bool = False  # whether an op has computed a nan from this inf
    read_by: str = ""  # _PYTHON or _SELECTION if Python or a selecting op has read the inf or nan; else empty
    source: str = ""  # the batch from which input data was loaded, or the path of a weight
    # Origins of other inputs of the same op. If one of these origins is reported, all are reported.
    others: dict[Origin, None] = field(default_factory=dict)

    @property
    def explains(self) -> bool:
        """Whether this inf or nan is a fault. A constant such as the -inf of a mask is not a fault."""
        return self.kind != "constant"


_ON_PURPOSE = Origin("constant")


class Watch:
    """The observer of ``diagnose``, which calls ``found`` with each finding to report."""

    def __init__(
        self, tracker: Tracker, found: Callable[[Finding], None], *, strict: bool, patience: int
    ) -> None:
        self._tracker, self._found, self._strict, self._patience = tracker, found, strict, patience
        # Maps the number of a backward pass to the origin of the first overflow in its fp16 gradients.
        # A few overflows in a row are normal while the loss scale is still too large.
        self._overflowed: dict[int, Origin] = {}
        self._origins: Storages[Origin] = Storages()
        self._seen: list[Origin] = []
        self._first_at: dict[Site, Origin] = {}
        self._wide = ShadowValues(torch.float64)  # the float64 values of tensors that overflowed
        self._in_buffers: dict[str, Origin] = {}  # maps the name of a buffer to the origin of its inf or nan

    def open(self, stack: ExitStack) -> None:
        """Patch torch's functions that run backward passes, load batches or read values."""
        for owner, name, make in (
            (torch.autograd, "_engine_run_backward", self._engine),
            (Function, "apply", self._apply),
            (dataloader._BaseDataLoaderIter, "__next__", self._next),
        ):
            stack.enter_context(patch.object(owner, name, make(vars(owner)[name])))
        for name in _READERS:
            stack.enter_context(patch.object(Tensor, name, self._reader(getattr(Tensor, name))))

    def _reader(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            with unwatched():
                for origin in self._origins_of(iter([tensor])):
                    origin.read_by = _PYTHON
            return method(tensor, *args, **kwargs)

        return read

    def _engine(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            with unwatched():
                for origin in self._origins_of(_tensors([outputs, args[:1]])):
                    self._report(origin, "the loss, where a backward pass starts")
            gradients = run(outputs, *args, **kwargs)
            with unwatched():
                for origin in self._origins_of(_tensors(gradients)):
                    self._reaches_gradient(origin, "a gradient that autograd.grad returned")
            return gradients

        return run_backward

    def _apply(self, method: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
        def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
            site = Site.here(function.__name__, self._tracker.current())
            outputs = method.__get__(None, function)(*args, **kwargs)
            self._function_ended(site, "", outputs, (args, kwargs))
            for node in {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}:
                if isinstance(node, BackwardCFunction):
                    node.register_hook(partial(self._function_ended, site, site.op))
            return outputs

        return classmethod(apply)

    def _function_ended(self, site: Site, forward_op: str, outputs: object, inputs: object) -> None:
        """Look for infs and nans that a user's autograd function produced in code that is not a torch op."""
        with unwatched():
            for output in _tensors(outputs):
                known = self._origins.get(output)
                if known is _ON_PURPOSE or (known and known.finding) or is_finite(output):
                    continue
                given = list(_tensors(inputs))
                origin = next((o for o in self._origins_of(iter(given)) if o.explains), None)
                if origin is None:
                    finding = finding_of_function(self._tracker, site, forward_op, output, given)
                    origin = Origin("function", finding)
                    self._seen.append(origin)
                self._origins.set(output, origin)

    def _next(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(loader: Any) -> Any:
            batch, number = following(loader), vars(loader)["_num_yielded"]
            for tensor in _tensors(batch):
                self._tracker.sources.set(tensor, f"batch {number} of the DataLoader")
                origin = self._origins.get(tensor)
                if origin is not None and not origin.explains:
                    self._origins.forget(tensor)  # a batch counts as input data, even if an op computed it
            return batch

        return next_batch

    def before(self, call: Call) -> None:
        """Report infs and nans that reach a gradient, and copy values that an in-place op will overwrite."""
        if call.is_backward:
            self._tracker.in_backward(torch._C._current_graph_task_id())
        for origin in self._read_by(call):
            if (leaf := call.leaf) is not None:
                self._reaches_gradient(origin, f"the gradient of {self._weight(leaf) or 'a leaf'}")
            elif call.traits.name == _TO_PYTHON:
                origin.read_by = _PYTHON
        written = {storage_address(a.tensor) for a in call.arguments if a.name in call.traits.written} - {0}
        for argument in call.arguments if written else ():  # an op may write to its input, as with out=
            if argument.name in call.traits.written or storage_address(argument.tensor) in written:
                argument.keep(is_read=argument.name not in call.traits.overwritten)
        if written and self._may_overflow_in_place(call):
            call.keep(call.changed(lambda tensor: self._widened(tensor).clone(), torch.float64))

    def _may_overflow_in_place(self, call: Call) -> bool:
        """Return whether an in-place op may overflow.

        The inputs of an in-place op that may overflow are copied first, because they are needed to compute
        the result in float64.
        """
        if call.is_backward or self._tracker.in_step or not call.is_repeatable:
            return False
        read = [given.tensor for given in call.arguments if given.name not in call.traits.overwritten]
        return any(tensor.dtype is torch.float16 or self._wide.get(tensor) is not None for tensor in read)

    def failed(self, call: Call, _: BaseException) -> None:
        """Report infs and nans in the arguments of an op that raised an error."""
        for origin in self._read_by(call):
            self._report(origin, f"an error of {call}")

    def after(self, call: Call, output: Any) -> None:
        """Look at the results of an op, and at the arguments that it wrote to."""
        traits = call.traits
        if traits.is_view:
            return
        for position in traits.partly_unwritten:
            self._origins.set(output[position], Origin("unwritten", site=call.site))
        results = [result for result in call.made(output) if not result.is_discrete]
        # If this rank passed an inf or nan into a collective, the collective's results get the same Origin.
        if traits.is_unwritten or traits.is_collective:
            sent = next(self._read_by(call), None) if traits.is_collective else None
            kind: Kind = "collective" if traits.is_collective else "unwritten"
            for result in results:
                self._origins.set(result.tensor, sent or Origin(kind, site=call.site))
            return
        for origin in self._read_by(call) if traits.base in _SELECTING else ():
            origin.read_by = origin.read_by or _SELECTION
        are_finite = [is_finite(result.tensor) for result in results]
        self._follow_overflow(call, output, is_new=not all(are_finite))
        for result, all_finite in zip(results, are_finite, strict=True):
            if all_finite:
                self._origins.forget(result.tensor)
                if self._in_buffers:
                    self._in_buffers.pop(self._weight(result.tensor), None)
            else:
                self._trace(call, result)
        for origin in self._read_by(call) if all(are_finite) else ():
            origin.is_absorbed |= bool(results)
            origin.is_compared |= not results

    def _follow_overflow(self, call: Call, output: Any, *, is_new: bool) -> None:
        """Track overflows, which are infs where the float64 result is finite.

        An overflow is reported if it leads to a finite result that differs greatly from the float64 result.
        """
        followed = [read.tensor for read in call.arguments if self._wide.get(read.tensor) is not None]
        if not (followed or (is_new and not call.is_backward)):
            return
        made = [result.tensor for result in call.made(output)]
        given = call.kept
        if call.is_repeatable and not call.traits.written and not call.is_backward:
            given = call.changed(self._widened, torch.float64)
        wide = None if given is None else call.again(given, made)
        for number, result in enumerate(made):
            self._wide.forget(result)
            if wide is None or not (result.is_floating_point() and self._wide.follows(result)):
                continue
            if not is_finite(result):
                self._wide.of(result).copy_(wide[number])
            elif followed and not call.traits.moves and _is_another(result, wide[number]):
                for origin in self._origins_of(iter(followed)):
                    if origin.kind == "made":
                        self._report(origin, f"a finite result that differs much from fp64, in {call}")

    def _widened(self, tensor: Tensor) -> Tensor:
        return self._wide.plain(tensor) if self._wide.get(tensor) is None else self._wide.of(tensor)

    def _trace(self, call: Call, result: Argument) -> None:
        """Find the origin of an inf or nan in an op's result.

        If the op wrote the inf or nan to a weight, report its origin.
        """
        numbers = [number for name, number in call.numbers.items() if name not in _ORDERS]
        verdict, held = judge(result, call.arguments, call.traits, numbers)
        origin = self._judged(call, result, verdict, held)
        self._origins.set(result.tensor, origin)
        if origin.is_reported or not origin.explains:
            return
        owner = self._weight(result.tensor) if result.name and not call.is_backward else ""
        if origin.kind == "collective" and not call.traits.moves:
            self._report(origin, f"{' and '.join(held)} in {call}")
        elif owner and isinstance(result.tensor, nn.Parameter):
            if origin.kind == "input" and call.traits.moves:
                origin.kind = "weight"  # an inf in a loaded weight is reported when an op uses the weight
            else:
                self._report(origin, f"the weight {owner}, written by {call}")
        elif self._strict and verdict in {"made", "became nan"}:
            self._report(origin, "")
        elif owner and not call.traits.moves:
            self._in_buffers[owner] = origin

    def _judged(self, call: Call, result: Argument, verdict: Verdict, held: Held) -> Origin:
        """Return the origin that a verdict names."""
        inputs = _unfinite(result, call.arguments, call.traits)
        match verdict:
            case "on purpose" if "nan" in held:
                return self._new("constant", call, result, held)
            case "on purpose" | "masked":
                return _ON_PURPOSE
            case "made":
                return self._made(call, result, held)
            case "became nan":
                return self._became_nan(call, result, inputs) or self._made(call, result, held)
            case _:
                return self._passed_on(call, result, inputs)

    def _origins_of(self, tensors: Iterator[Tensor]) -> Iterator[Origin]:
        """Yield the origin of each tensor's infs and nans, if there is a finding about this origin."""
        origins = (self._origins.get(tensor) for tensor in tensors)
        return (origin for origin in origins if origin is not None and origin.finding is not None)

    def _read_by(self, call: Call) -> Iterator[Origin]:
        return self._origins_of(argument.tensor for argument in call.arguments)

    def _new(self, kind: Kind, call: Call, result: Argument, held: Held, site: Site | None = None) -> Origin:
        finding = finding_of(self._tracker, call, kind, result.tensor, held)
        self._seen.append(Origin(kind, finding, site))
        return self._seen[-1]

    def _origin_of(self, call: Call, result: Argument, given: Argument) -> Origin:
        """Return the origin of an inf or nan in an argument.

        The finding about this origin names the first op that reads the inf or nan.
        """
        tensor = given.tensor
        origin = self._origins.get(tensor)
        if origin is None:  # no op in the region made them
            origin = Origin("weight" if self._weight(tensor) else "input")
            self._origins.set(tensor, origin)
        if origin is _ON_PURPOSE:
            return origin
        origin.source = origin.source or self._tracker.sources.get(tensor) or self._weight(tensor)
        reads = origin.kind in {"weight", "input"} and not (origin.is_read or call.traits.moves)
        if origin.finding is None:
            self._seen.append(origin)
        if origin.finding is None or reads:
            origin.is_read = reads
            memory = origin.site if origin.kind in {"unwritten", "collective"} else None
            origin.finding = finding_of(
                self._tracker, call, origin.kind, result.tensor, given.held, given, memory, origin.source
            )
        return origin

    def _became_nan(self, call: Call, result: Argument, inputs: Sequence[Argument]) -> Origin | None:
        """Return the origin of the inf from which an op produced a nan, or None if it explains nothing."""
        if call.traits.base in SOFTMAXES and not any("inf" in given.held for given in inputs):
            return None
        for given in inputs:
            origin = self._origin_of(call, result, given)
            if origin.explains:
                origin.became_nan, found = True, origin.finding
                if found is not None and not found.reached:
                    origin.finding = replace(found, reached=f"nan in {call}")
                return origin
        return None

    def _made(self, call: Call, result: Argument, held: Held) -> Origin:
        """Return the origin of an inf or nan that an op produced."""
        if not call.is_backward:
            return self._new("made", call, result, held, call.site)
        site = call.forward_site
        first = None if site is None else self._first_at.get(site)
        if first is not None and (first.is_reported or first.is_compared):
            return first  # if an op and its derivative both produce inf or nan, report it once
        origin = self._new("made", call, result, held, site)
        if site is not None:
            self._first_at.setdefault(site, origin)
        return origin

    def _passed_on(self, call: Call, result: Argument, inputs: Sequence[Argument]) -> Origin:
        """Return the origin of an inf or nan that an op passes on from its inputs."""
        faults = [
            (given, origin)
            for given in inputs
            for origin in self._origins_of(iter([given.tensor]))
            if origin.explains and (origin.kind == "made" or "nan" in given.held)
        ]
        origin = self._origin_of(call, result, faults[0][0] if faults else inputs[0])
        origin.others |= {other: None for _, other in faults if other is not origin}
        return origin

    def step_ended(self, optimizer: Optimizer) -> None:
        """Report infs and nans in the state of an optimizer after its step."""
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        for key, state in (entry for entries in states for entry in entries.items()):
            for origin in self._origins_of(_tensors(state)):
                if origin.explains:
                    self._report(origin, f"the state {key} of {type(optimizer).__name__}")

    def left_over(self) -> None:
        """Report, at the end of the region, infs and nans that were not reported before.

        Overflows in the last backward passes are reported, and so are buffers that are not finite. If no
        backward pass ran, every inf or nan that no op turned into finite numbers is also reported.
        """
        passes = self._tracker.backward_passes
        if passes in self._overflowed and not next(iter(self._overflowed.values())).is_absorbed:
            self._report_overflowed()
        for name, origin in self._in_buffers.items():
            self._report(origin, f"the buffer {name}, at the end of the region")
        if passes:
            return
        alive = {id(origin) for origin in self._origins.alive()}
        for origin in self._seen:
            held = origin.finding.held if origin.finding is not None and origin.explains else ()
            is_there = origin.became_nan or "nan" in held or id(origin) in alive
            if held and origin.read_by == _PYTHON:
                self._report(origin, "a number that Python has read (by item, float or print)")
            elif held and not origin.is_absorbed and is_there:
                self._report(origin, "still in a tensor at the end of the region")

    def read_elsewhere(self) -> Iterator[Finding]:
        """Yield findings about infs and nans that were used, but reached no gradient or weight.

        An inf or nan counts as used if Python reads it as a number. An inf or nan also counts as used if an
        op such as argmin selects elements based on it.

        Overflows of fp16 gradients are not reported. The scaler meets them in its search for the loss scale.
        """
        for origin in self._seen:
            found = origin.finding
            if found is None or origin.is_reported or not origin.explains or not found.held:
                continue
            is_scaled = (found.kind, found.direction, found.dtype) == _SCALED
            if origin.read_by and not is_scaled:
                yield replace(found, reached=f"{found.reached}; read by {origin.read_by}".removeprefix("; "))

    def _weight(self, tensor: Tensor) -> str:
        """Return the path of a parameter or buffer, or "" if the tensor is neither."""
        return self._tracker.weight(tensor) or ("(a parameter)" if isinstance(tensor, nn.Parameter) else "")

    def _reaches_gradient(self, origin: Origin, what: str) -> None:
        found = origin.finding
        # Whether a loss scale that is too large can cause this overflow.
        is_scaled = found is not None and (found.kind, found.direction, found.dtype) == _SCALED
        if found is None or not is_scaled or "nan" in found.held or self._strict:
            self._report(origin, what)
            return
        passes = self._tracker.backward_passes
        if not {passes, passes - 1} & self._overflowed.keys():
            self._overflowed.clear()
        self._overflowed.setdefault(passes, origin)
        if len(self._overflowed) >= self._patience:
            self._report_overflowed()

    def _report_overflowed(self) -> None:
        first, *others = self._overflowed.values()
        in_passes = f"{len(others) + 1} backward passes" if others else "backward pass"
        self._report(first, f"gradients that are not finite, in the last {in_passes}")

    def _report(self, origin: Origin, reached: str) -> None:
        if origin.is_reported or origin.finding is None:
            return
        origin.is_reported = True
        if origin.site is not None:  # an inf or nan from the backward pass of the op is not reported again
            self._first_at.get(origin.site, origin).is_reported = True
            self._first_at[origin.site] = origin
        then = "; ".join(filter(None, (origin.finding.reached, reached)))
        origin.finding = replace(origin.finding, reached=then)
        self._found(origin.finding)
        for other in origin.others:
            self._report(other, reached)


def _is_another(result: Tensor, wide: Tensor) -> bool:
    """Return whether an element differs by more than 50 % from its value in a wider dtype.

    An element is ignored if its value in the wider dtype is outside the range of the result's dtype.
    """
    info = torch.finfo(result.dtype)
    holds = (wide.abs() >= info.smallest_normal) & (wide.abs() <= info.max)
    return bool((holds & ((result.to(wide.dtype) - wide).abs() > 0.5 * wide.abs())).any())


def _tensors(values: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf


def _unfinite(result: Argument, given: Sequence[Argument], traits: OpTraits) -> list[Argument]:
    """Return the inputs of a result that are not finite; those with a nan come first."""
    return sorted(
        (argument for argument in _inputs(result, given, traits) if argument.held),
        key=lambda argument: "nan" not in argument.held,
    )


def _inputs(result: Argument, given: Sequence[Argument], traits: OpTraits) -> Sequence[Argument]:
    """Return the arguments from which a result is computed. In an op on lists, these have the same index."""
    if not traits.is_listwise or result.index is None:
        return given
    return [argument for argument in given if argument.index in {None, result.index}]


def judge(
    result: Argument, given: Sequence[Argument], traits: OpTraits, scalars: Sequence[float]
) -> tuple[Verdict, Held]:
    """Determine where the infs or nans of one result come from.

    Return the verdict, and which of "inf", "-inf" and "nan" the op made or passed on.
    """
    given = _inputs(result, given, traits)
    values, unfinite = non_finite(result.tensor), _unfinite(result, given, traits)
    own: list[tuple[Held, Tensor | None]] = [] if unfinite else [(values, None)]  # none from an input
    if unfinite and traits.is_pointwise and (new := _new_elements(result.tensor, unfinite)) is not None:
        own.append((non_finite(result.tensor, new), new))
    # An op that merely copies values cannot be the origin of a value that one of its arguments contains.
    if unfinite and traits.moves:
        brought = {name for argument in unfinite for name in argument.held}
        own.append((tuple(name for name in values if name not in brought), None))
    for held, where in own:
        if not held:
            continue
        verdict: Verdict = "made"
        if _are_constants(held, scalars, computes=bool(given) and not traits.moves):
            verdict = "on purpose"
        elif held == ("-inf",) and _is_masked(result.tensor, given, where):
            verdict = "masked"
        if verdict == "made" or not unfinite:
            return verdict, held
    if "nan" in values and "nan" not in unfinite[0].held and not any(map(math.isnan, scalars)):
        return "became nan", ("nan",)
    return "passed on", values


def _are_constants(held: Held, scalars: Sequence[float], *, computes: bool) -> bool:
    """Return whether the infs or nans of a result come from Python numbers among the op's arguments.

    Arithmetic may flip the sign of an inf. Signs are therefore compared only for ops that merely copy values.
    """
    if "nan" in held:
        return any(map(math.isnan, scalars))
    if computes:
        return any(map(math.isinf, scalars))
    return all(float(name) in scalars for name in held)


def _is_masked(result: Tensor, given: Sequence[Argument], where: Tensor | None) -> bool:
    """Return whether an input is close to its dtype's lowest number wherever the result is -inf."""
    values = real_values(result)
    if values is None:
        return False
    infinite = values == -math.inf
    if where is not None:
        infinite = infinite & where
    for argument in given:
        if argument.values is not None:
            largest = torch.finfo(argument.tensor.dtype).max
            huge = argument.values <= -(_MASKING if largest > 1e38 else _MASKING_IN_FP16) * largest
            spread = _spread(huge, infinite)
            if spread is not None and bool((spread | ~infinite).all()):
                return True
    return False


def _new_elements(result: Tensor, unfinite: Sequence[Argument]) -> Tensor | None:
    """Return a mask that is True where a pointwise result is not finite although all inputs are.

    Return None if this is not known.
    """
    values = real_values(result)
    if values is None:
        return None
    new = ~values.isfinite()
    for argument in unfinite:
        if argument.values is None:
            return None
        finite = argument.values.isfinite()
        if argument.tensor.is_complex():  # a non-finite real or imaginary part affects both parts of a result
            finite = finite.all(-1, keepdim=True).expand_as(finite)
        spread = _spread(finite, new)
        if spread is None:
            return None
        new = new & spread
    return new


def _spread(mask: Tensor, over: Tensor) -> Tensor | None:
    """Broadcast a mask to the shape of a result, or return None if the shapes do not allow it."""
    try:
        return mask.broadcast_to(over.shape)
    except RuntimeError:
        return None
