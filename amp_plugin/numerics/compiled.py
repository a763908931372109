"""Compiled code next to the same code run eagerly: the first result that differs by more than rounding.

::

    a graph is called:  as it was compiled, eagerly, and once more in float64
    what is compared:   results, inputs that it writes, inputs' gradients for random ones of the results
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
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from typing_extensions import Self

from amp_plugin.numerics.finding import laid_out
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Observer, Region, listed
from amp_plugin.numerics.places import Place, place_in_trace
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import as_json, distance, unwatched
from amp_plugin.precision import short_name
from amp_plugin.scaling.step_log import random_numbers_from, random_state

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
        compiled: relative error against float64; what ops make that do not run in it is taken as exact.
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

    def __str__(self) -> str:
        where = f"{self.result} of graph {self.graph} ({short_name(self.dtype)})"
        rows = [("error", f"{self.compiled:.2g}, relative; eager code's is {self.eager:.2g}")]
        if self.op:
            rows.append(("op", self.op + ("" if self.alone else ", or what it is compiled with")))
        if self.place is not None:
            rows.append(("line", f"{self.place}: {self.place.text}"))
        return laid_out(f"compiled code differs from eager code in {where}", rows)


class CompiledComparison:
    """A region in which every graph that torch.compile makes is also run eagerly and in float64.

    The program goes on with the compiled code's results. Random numbers are those of eager code
    (``fallback_random`` of inductor). Slow: each graph runs three times, and its backward pass as well, for
    random gradients of the results. Graphs that were compiled before the region are not compared.

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
        from torch._functorch import config as functorch  # noqa: PLC0415
        from torch._inductor import config  # noqa: PLC0415 -- takes a second

        with ExitStack() as stack:
            stack.enter_context(config.patch(fallback_random=True))
            stack.enter_context(functorch.patch(donated_buffer=False))  # backward passes run twice
            for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
                backend = getattr(torch, name)
                stack.enter_context(patch.object(backend, "__call__", self._watching(backend.__call__)))
            self._patches = stack.pop_all()
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
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
        names = ("graphs", "compared", "differences", "not_compared")
        return {name: as_json(getattr(self, name)) for name in names}


def has_compiled() -> bool:
    """Return whether torch.compile has made functions in this process."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(map(callable, frames.cached_backends.values()))


Reading = tuple[str, int]
"""What is compared: a ``"result"``, an ``"input"`` or an input's ``"gradient"``; and its number."""


def _readings(inputs: Sequence[Any], results: Sequence[Any]) -> dict[Reading, Tensor]:
    """Return what a graph has made of its inputs, and its inputs' gradients."""
    held = {("result", n): value for n, value in enumerate(results) if isinstance(value, Tensor)}
    outputs = [value for value in held.values() if value.requires_grad]
    held |= {("input", n): value for n, value in enumerate(inputs) if isinstance(value, Tensor)}
    needing = [n for (kind, n), value in held.items() if kind == "input" and value.requires_grad]
    if needing and outputs and torch.is_grad_enabled():
        generator, given = torch.Generator().manual_seed(0), [inputs[n] for n in needing]
        grads = [torch.randn(value.shape, generator=generator).to(value) for value in outputs]
        found = torch.autograd.grad(outputs, given, grads, retain_graph=True, allow_unused=True)
        held |= {("gradient", n): grad for n, grad in zip(needing, found, strict=True) if grad is not None}
    return held


class _Call:
    """One call of a graph, and eager runs on copies of its inputs: in float64 too, with roundings changed."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.inputs = [_copied(value) for value in inputs]
        self._module, self._random_state = module, random_state()
        self._nudged: list[dict[Reading, Tensor]] = []
        wide = WideRun(None, torch.float64)
        self.eager = self._run(wide)
        with unwatched():
            self._exact = {
                reading: wide.shadows.of(value).clone()
                for reading, value in self.eager.items()
                if wide.shadows.follows(value)
            }

    def _run(self, region: Region) -> dict[Reading, Tensor]:
        """Run the graph eagerly while a region sees its ops; nothing is held if that fails."""
        inputs = [_copied(value) for value in self.inputs]
        try:
            with random_numbers_from(self._random_state), region.recorder:
                return _readings(inputs, self._module(*inputs))
        except Exception:  # noqa: BLE001 -- whatever the user's graph raises
            return {}

    def errors(self, reading: Reading, value: Tensor) -> tuple[float, float] | None:
        """Return the errors of a compiled result and of eager code's; None if rounding explains the first."""
        eager = self.eager.get(reading)
        if eager is None or value.numel() == 0:
            return None
        exact, eps = self._exact.get(reading, eager), torch.finfo(value.dtype).eps
        for order, times in ((2.0, 1.0), (torch.inf, _PEAK)):
            error, own = distance(value, exact, order), distance(eager, exact, order)
            if error <= times * (_TIMES * own + _EPS * eps):
                continue
            if not self._nudged:  # results that are each off by an eps: by so much rounding alone may differ
                self._nudged = [self._run(_Nudged(seed)) for seed in range(_NUDGES)]
            others = [other[reading] for other in self._nudged if reading in other]
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
        results = self.compiled(*inputs)
        if not call.eager:
            self.comparison.not_compared["a graph that does not run eagerly"] += 1
        elif difference := self._difference(call, _readings(inputs, results)):
            self.has_differed = True
            self.comparison.differences.append(difference)
        return results

    def _difference(self, call: _Call, held: Mapping[Reading, Tensor]) -> CompiledDifference | None:
        """Return the first result that differs by more than rounding."""
        for reading, value in held.items():
            kind, number = reading
            if kind == "input" and torch.equal(call.eager[reading], call.inputs[number]):
                continue  # norms on the CPU write without a new version
            if not value.is_floating_point():
                if not torch.equal(value, call.eager[reading]):
                    self.comparison.not_compared["a result of integers, which differs"] += 1
                continue
            self.comparison.compared += 1
            errors = call.errors(reading, value)
            if errors is not None:
                origin = self._origin(call, reading)
                node = origin or self._reader(reading)
                return CompiledDifference(
                    graph=self.number,
                    result=self._name(reading),
                    dtype=value.dtype,
                    compiled=errors[0],
                    eager=errors[1],
                    op=str(getattr(node.target, "__name__", node.target)) if node else "",
                    place=place_in_trace(node.stack_trace or "") if node else None,
                    alone=origin is not None,
                )
        return None

    def _origin(self, call: _Call, reading: Reading) -> fx.Node | None:
        """Return the first op whose own result differs, where the graph is asked for the results of all."""
        module = copy.deepcopy(self.module)
        output = module.graph.output_node()
        kind, number = reading
        before = _before(output.args[0][number] if kind == "result" else output)  # type: ignore[index,arg-type]
        ops = [node for node in module.graph.nodes if node in before and node.op.startswith("call_")]
        ops = [node for node in ops if isinstance(node.meta.get("example_value"), Tensor)]
        output.args = (tuple(ops),)
        module.recompile()
        again = _Call(copy.deepcopy(module), call.inputs)
        try:
            values = self.compile(module, call.inputs)(*map(_copied, call.inputs))
        except Exception:  # noqa: BLE001 -- a backend may refuse such a graph
            return None
        for index, (node, value) in enumerate(zip(ops, values, strict=True)):
            if value.is_floating_point() and again.errors(("result", index), value) is not None:
                return node  # type: ignore[no-any-return]
        return None

    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def _reader(self, reading: Reading) -> fx.Node | None:
        """Return the op that makes a result, or the first that reads an input."""
        kind, number = reading
        if kind == "result":
            return self.module.graph.output_node().args[0][number]  # type: ignore[index,return-value]
        return next(iter(self._inputs()[number].users), None)

    def _name(self, reading: Reading) -> str:
        """Return what is compared, in words; an input as the program's modules name it."""
        kind, number = reading
        if kind == "result":
            return f"result {number}"
        target = str(self._inputs()[number].target)
        name = ".".join(_OWNED.findall(target)) or target
        return f"the gradient of {name}" if kind == "gradient" else f"{name}, which it writes,"


class _Nudged(Region, Observer):
    """A region whose results are each off by an eps, up or down."""

    def __init__(self, seed: int) -> None:
        super().__init__(Tracker(), self)
        self._generator = torch.Generator().manual_seed(seed)

    def after(self, call: Call, output: Any) -> None:
        """Change the results of an op in place; a view is left as it is."""
        results = [] if call.traits.is_view else [made.tensor for made in call.made(output)]
        for result in results:
            if result.is_floating_point():
                up = torch.randint(0, 2, result.shape, generator=self._generator).to(result.device)
                result.mul_((1 + (2 * up - 1) * torch.finfo(result.dtype).eps).to(result.dtype))


def _copied(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return value.detach().clone().requires_grad_(value.requires_grad) if is_tensor else value


def _before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found
