"""Compiled code next to the same code run eagerly: the first result that differs by more than rounding.

::

    a graph is called:  the graph runs eagerly, once more in float64, and then as it was compiled
    its backward ends:  the gradients of its inputs likewise, from the same gradients of its outputs
    compiled - float64  against  eager - float64:  more than 4 times as far (and 4 eps) is not rounding

Eager code rounds after every op, compiled code where its kernels end, so neither is the measure of the other.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from amp_plugin.numerics.op import listed
from amp_plugin.numerics.places import Place, place_in_trace
from amp_plugin.numerics.rounding import distance
from amp_plugin.numerics.values import as_json
from amp_plugin.precision import short_name
from amp_plugin.scaling.replay import restore_random_state
from amp_plugin.scaling.step_log import random_state

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_TIMES, _EPS = 4.0, 4.0  # compiled code may be so many times as far from float64, and so many eps more
_PEAK = 4.0  # the largest of many elements' errors is less steady than their norm
_NUDGES = 4
_OWNED = re.compile(r"_(?:modules|parameters|buffers)_(.*?)(?=_(?:modules|parameters|buffers)_|_$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledDifference:
    """A result of a compiled graph that differs from eager code's by more than rounding.

    Attributes:
        graph: number of the graph, from 0, in the order of compilation.
        result: which result, in words.
        dtype: of the result.
        compiled: relative error against float64, or against eager code where a graph does not run in float64.
        eager: the largest error of eager code, whose roundings were changed several times.
        op: the first op of the graph whose own result differs; if there is none, the op that makes the result
            or reads the input whose gradient differs. Empty if the graph has none.
        place: the line of the program that calls this op; None if the graph does not say.
        alone: whether the op's own result was seen to differ.
    """

    graph: int
    result: str
    dtype: torch.dtype
    compiled: float
    eager: float
    op: str = ""
    place: Place | None = None
    alone: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return {
            "graph": self.graph,
            "result": self.result,
            "dtype": short_name(self.dtype),
            "compiled": as_json(self.compiled),
            "eager": as_json(self.eager),
            "op": self.op,
            "line": None if self.place is None else str(self.place),
            "alone": self.alone,
        }

    def __str__(self) -> str:
        where = f"{self.result} of graph {self.graph} ({short_name(self.dtype)})"
        lines = [
            f"compiled code differs from eager code in {where}",
            f"  error       {self.compiled:.2g}, relative; eager code's is {self.eager:.2g}",
        ]
        if self.op:
            lines.append(f"  op          {self.op}" + ("" if self.alone else ", or what it is compiled with"))
        if self.place is not None:
            lines.append(f"  line        {self.place}: {self.place.text}")
        return "\n".join(lines)


class CompiledComparison:
    """A region in which every graph that torch.compile makes is also run eagerly and in float64.

    The program goes on with the compiled code's results. Random numbers are those of eager code
    (``fallback_random`` of inductor). Slow: each graph runs three times, and so does each backward pass.
    Graphs that were compiled before the region are not compared.

    Attributes:
        differences: for each graph the first result that differs by more than rounding.
        graphs: how many graphs were compiled.
        compared: how many results and gradients were compared.
        not_compared: what was not, and how often.
    """

    def __init__(self) -> None:
        self.differences: list[CompiledDifference] = []
        self.graphs = 0
        self.compared = 0
        self.not_compared: Counter[str] = Counter()
        self.is_open = False
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Open the region."""
        from torch._inductor import config  # noqa: PLC0415 -- takes a second

        with ExitStack() as stack:
            stack.enter_context(config.patch(fallback_random=True))
            for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
                backend = getattr(torch, name)
                stack.enter_context(patch.object(backend, "__call__", self._watching(backend.__call__)))
            self._patches = stack.pop_all()
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region; graphs that were compiled in it run as compiled from now on."""
        self.is_open = False
        self._patches.close()

    def _watching(self, backend_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(backend: Any, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
                return backend_call(backend, module, inputs, **options)

            kept = copy.deepcopy(module)  # backends change what they compile
            graph = _Graph(self, self.graphs, kept, compile_graph(module, inputs), compile_graph)
            self.graphs += 1
            return graph.run

        return call

    @property
    def is_empty(self) -> bool:
        """Whether nothing was compiled."""
        return not self.graphs

    def report(self) -> str:
        """Return what differs, and what could not be compared, as text."""
        lines = [str(difference) for difference in self.differences]
        lines.append(
            f"{self.compared} results of {self.graphs} compiled graphs compared with eager code"
            + ("" if self.differences else ": rounding explains every difference")
        )
        if not self.graphs:
            lines = ["nothing was compiled: the program calls no function that torch.compile has made"]
        if self.not_compared:
            lines.append(f"not compared: {listed(self.not_compared)}")
        return "\n\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        return {
            "graphs": self.graphs,
            "compared": self.compared,
            "differences": [difference.to_dict() for difference in self.differences],
            "not_compared": dict(self.not_compared),
        }


def has_compiled() -> bool:
    """Return whether torch.compile has made functions in this process."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(map(callable, frames.cached_backends.values()))


class _Twin:
    """A graph run on copies of a call's inputs: eagerly, in float64, or with its roundings changed.

    Attributes:
        inputs: the copies; some may be written by the graph.
        results: those of the graph; None if it could not run.
        gradients: of the inputs, once they are computed.
    """

    def __init__(self, call: _Call, run: Callable[..., Any], *, wide: bool = False) -> None:
        self.inputs = [_copied(value, wide=wide) for value in call.inputs]
        self.results: Sequence[Any] | None = None
        self.gradients: list[Tensor | None] = [None] * len(self.inputs)
        state = random_state()
        restore_random_state(call.random_state)
        try:
            self.results = run(*self.inputs)
        except Exception:  # noqa: BLE001 -- an op has no kernel for float64, or checks its dtypes
            self.results = None
        restore_random_state(state)

    def differentiate(self, given: Mapping[int, Tensor]) -> None:
        """Compute the gradients of the inputs from those of some results."""
        made = _tensors(self.results or ())
        results = {number: result for number, result in made if result.requires_grad and number in given}
        needing = {number: tensor for number, tensor in _tensors(self.inputs) if tensor.requires_grad}
        grads = [given[number].to(result.dtype) for number, result in results.items()]
        if grads and needing:
            found = torch.autograd.grad(
                list(results.values()), list(needing.values()), grads, allow_unused=True, retain_graph=True
            )
            for number, grad in zip(needing, found, strict=True):
                self.gradients[number] = grad


class _Reading(NamedTuple):
    """What is compared: a result, an input that the graph writes, or an input's gradient."""

    kind: Literal["results", "inputs", "gradients"]
    number: int

    def of(self, twin: _Twin) -> Any:
        """Return it of a twin; None if the twin has none."""
        return (getattr(twin, self.kind) or {self.number: None})[self.number]


class _Call:
    """One call of a graph, and its twins."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.inputs = [_copied(value) for value in inputs]
        self.random_state = random_state()
        self._module = module
        self._given: Mapping[int, Tensor] = {}
        self._nudged: list[_Twin] = []
        self.eager = _Twin(self, module)
        self.wide = _Twin(self, _Interpreter(module, _widened).run, wide=True)

    def differentiate(self, given: Mapping[int, Tensor]) -> None:
        """Compute the gradients of the inputs, from those of some results, in each twin."""
        self._given = given
        self._nudged = []
        for twin in (self.eager, self.wide):
            twin.differentiate(given)

    def nudged(self) -> list[_Twin]:
        """Return runs whose results are each off by an eps: by so much rounding alone may differ."""
        if not self._nudged:
            for seed in range(_NUDGES):
                nudge = partial(_nudged, generator=torch.Generator().manual_seed(seed))
                twin = _Twin(self, _Interpreter(self._module, nudge).run)
                twin.differentiate(self._given)
                self._nudged.append(twin)
        return self._nudged

    def errors(self, value: Tensor, reading: _Reading) -> tuple[float, float] | None:
        """Return the errors of a compiled result and of eager code's; None if rounding explains the first."""
        eager, wide = reading.of(self.eager), reading.of(self.wide)
        if eager is None or value.numel() == 0:
            return None
        exact, eps = eager if wide is None else wide, torch.finfo(value.dtype).eps
        for order, times in ((2.0, 1.0), (torch.inf, _PEAK)):
            error, own = distance(value, exact, order), distance(eager, exact, order)
            if error <= times * (_TIMES * own + _EPS * eps):
                continue
            others = [other for other in map(reading.of, self.nudged()) if other is not None]
            own = max([own, *(distance(other, exact, order) for other in others)])
            if error > times * (_TIMES * own + _EPS * eps):
                return error, own
        return None


@dataclass(eq=False, slots=True)
class _Graph:
    """One graph: as it was traced, and as it was compiled."""

    comparison: CompiledComparison
    number: int
    module: fx.GraphModule
    compiled: Callable[..., Any]
    compile: Compile
    has_differed: bool = field(default=False, init=False)

    def run(self, *inputs: Any) -> Any:
        """Run the compiled graph, and compare it with eager code."""
        if not self.comparison.is_open or self.has_differed:
            return self.compiled(*inputs)
        call = _Call(self.module, inputs)
        if call.eager.results is None:
            self.comparison.not_compared["a graph that does not run eagerly"] += 1
            return self.compiled(*inputs)
        copies = zip(call.inputs, call.eager.inputs, strict=True)
        written = [n for n, (before, now) in enumerate(copies) if _differs(before, now)]
        follows = torch.is_grad_enabled() and not any(inputs[number].requires_grad for number in written)
        results = self.compiled(*(self._followed(call, inputs) if follows else inputs))
        for number, result in _tensors(results):
            self._compare(call, result, _Reading("results", number))
        for number in written:
            self._compare(call, inputs[number], _Reading("inputs", number))
        if follows:
            _when_given(call, results)
        return results

    def _followed(self, call: _Call, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs, with a node of autograd before each that compares the gradient it gets."""
        numbers = [number for number, tensor in _tensors(inputs) if tensor.requires_grad]

        def compare(grads: Sequence[Tensor | None]) -> None:
            for number, grad in zip(numbers, grads, strict=True):
                if grad is not None:
                    self._compare(call, grad, _Reading("gradients", number))

        followed = list(inputs)
        if numbers:
            passed = _Passed.apply(compare, *(inputs[number] for number in numbers))  # type: ignore[no-untyped-call]
            for number, tensor in zip(numbers, passed, strict=True):
                followed[number] = tensor
        return followed

    def _compare(self, call: _Call, value: Tensor, reading: _Reading) -> None:
        if self.has_differed:
            return
        if not value.is_floating_point():
            if not torch.equal(value, reading.of(call.eager)):
                self.comparison.not_compared["a result of integers, which differs"] += 1
            return
        self.comparison.compared += 1
        errors = call.errors(value, reading)
        if errors is not None:
            self.has_differed = True
            origin = self._origin(call, reading)
            node = origin or self._reader(reading)
            found = CompiledDifference(
                graph=self.number,
                result=self._name(reading),
                dtype=value.dtype,
                compiled=errors[0],
                eager=errors[1],
                op=str(getattr(node.target, "__name__", node.target)) if node else "",
                place=place_in_trace(node.stack_trace or "") if node else None,
                alone=origin is not None,
            )
            self.comparison.differences.append(found)

    def _origin(self, call: _Call, reading: _Reading) -> fx.Node | None:
        """Return the first op whose own result differs, where the graph is asked for the results of all."""
        module = copy.deepcopy(self.module)
        output = module.graph.output_node()
        result = output.args[0][reading.number] if reading.kind == "results" else output  # type: ignore[index]
        before = _before(result)  # type: ignore[arg-type]
        ops = [node for node in module.graph.nodes if node in before and node.op.startswith("call_")]
        ops = [node for node in ops if isinstance(node.meta.get("example_value"), Tensor)]
        output.args = (tuple(ops),)
        module.recompile()
        again = _Call(copy.deepcopy(module), call.inputs)
        inputs = [_copied(value) for value in call.inputs]
        try:
            values = self.compile(module, inputs)(*inputs)
        except Exception:  # noqa: BLE001 -- a backend may refuse such a graph
            return None
        for number, node in enumerate(ops):
            value = values[number]
            if value.is_floating_point() and again.errors(value, _Reading("results", number)) is not None:
                return node  # type: ignore[no-any-return]
        return None

    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def _reader(self, reading: _Reading) -> fx.Node | None:
        """Return the op that makes a result, or the first that reads an input."""
        if reading.kind == "results":
            return self.module.graph.output_node().args[0][reading.number]  # type: ignore[index,return-value]
        return next(iter(self._inputs()[reading.number].users), None)

    def _name(self, reading: _Reading) -> str:
        """Return what is compared, in words; an input as the program's modules name it."""
        if reading.kind == "results":
            return f"result {reading.number}"
        target = str(self._inputs()[reading.number].target)
        name = ".".join(_OWNED.findall(target)) or target
        return f"the gradient of {name}" if reading.kind == "gradients" else f"{name}, which it writes,"


def _when_given(call: _Call, results: Any) -> None:
    """Differentiate a call's twins in the backward pass, once the results' gradients are there."""
    needing = {number: result for number, result in _tensors(results) if result.requires_grad}

    def differentiate(grads: Sequence[Tensor | None]) -> None:
        call.differentiate({n: grad for n, grad in zip(needing, grads, strict=True) if grad is not None})

    if needing:
        torch.autograd.graph.register_multi_grad_hook(list(needing.values()), differentiate)


class _Passed(torch.autograd.Function):
    """The identity; its backward hands the gradients over."""

    @staticmethod
    def forward(ctx: Any, hand_over: Callable[[Sequence[Tensor | None]], None], *tensors: Tensor) -> Any:
        """Return the tensors."""
        ctx.hand_over = hand_over
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients."""
        ctx.hand_over(grads)
        return None, *grads


class _Interpreter(fx.Interpreter):
    """Runs a graph; ``change`` makes another value of what each op returns."""

    def __init__(self, module: fx.GraphModule, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self._change = change

    def run_node(self, n: fx.Node) -> Any:
        """Run one op."""
        value = super().run_node(n)
        changes = n.op.startswith("call_") or n.op == "get_attr"
        return tree_map_only(Tensor, self._change, value) if changes else value


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _nudged(tensor: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return a result with each element off by an eps, up or down; a view is left as it is."""
    if not tensor.is_floating_point() or tensor._is_view():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device)
    return tensor * (1 + (2 * up - 1) * torch.finfo(tensor.dtype).eps).to(tensor.dtype)


def _tensors(values: Any) -> list[tuple[int, Tensor]]:
    """Return the floating-point tensors among a graph's inputs or results, with their positions."""
    return [(number, value) for number, value in enumerate(values) if isinstance(value, Tensor)]


def _copied(value: Any, *, wide: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = value.detach().clone()
    return (_widened(made) if wide else made).requires_grad_(value.requires_grad)


def _differs(before: Any, now: Any) -> bool:
    """Return whether a graph has written one of its inputs; norms on the CPU do so without a new version."""
    return isinstance(now, Tensor) and not torch.equal(before.detach(), now.detach())


def _before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
