"""Compare compiled code with eager code, and find the first result that differs by more than rounding.

::

    each time a compiled graph is called, also run the graph eagerly

    compare the results, and the inputs that the graph modifies in place

    compare the gradients of the inputs, computed from random gradients of the results

    if they differ by more than 4 eps:

        run the graph eagerly four more times, and change each op's result by one eps

        run the graph eagerly once more in float64

        allowed = 4 * (largest difference between the first eager run and the five other eager runs) + 4 eps

        if the difference is more than allowed, rounding does not explain it
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from typing_extensions import Self

from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region, listed
from amp_plugin.numerics.places import place_in_trace
from amp_plugin.numerics.recorded import Difference
from amp_plugin.numerics.shadow import WideRun
from amp_plugin.numerics.values import as_json, distance, unwatched
from amp_plugin.precision import short_name

_TIMES, _EPS = 4.0, 4.0
_PEAK = 4.0  # extra tolerance for the largest elementwise difference, which varies more than the norm
_NUDGES = 4
_OWNED = re.compile(r"_(?:modules|parameters|buffers)_(.*?)(?=_(?:modules|parameters|buffers)_|_$)")


class CompiledComparison:
    """A region in which every graph compiled by torch.compile also runs eagerly, to compare the results.

    The program continues with the results of the compiled code. Eager and compiled code draw the same random
    numbers, because inductor's ``fallback_random`` is set. The region is slow, because the forward and
    backward pass of each graph run at least twice. Graphs that were compiled before the region are not
    compared.

    Attributes:
        differences: For each graph, the first result that differs by more than rounding can explain, if there
            is one.
        graphs: The number of graphs that were compiled.
        compared: The number of results and gradients that were compared.
        not_compared: A ``Counter`` of the reasons why results could not be compared.
    """

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.graphs = 0
        self.compared = 0
        self.not_compared: Counter[str] = Counter()
        self._patches: ExitStack | None = None

    def __enter__(self) -> Self:
        """Open the region."""
        from torch._functorch import config as functorch  # noqa: PLC0415
        from torch._inductor import config  # noqa: PLC0415 -- takes a second

        with ExitStack() as stack:
            stack.enter_context(config.patch(fallback_random=True))
            stack.enter_context(functorch.patch(donated_buffer=False))  # because backward passes run twice
            for name in ("_TorchCompileInductorWrapper", "_TorchCompileWrapper"):
                backend = getattr(torch, name)
                stack.enter_context(patch.object(backend, "__call__", self._watching(backend.__call__)))
            self._patches = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the region. Graphs that were compiled inside the region are no longer compared."""
        if self._patches is not None:
            self._patches.close()
        self._patches = None

    def _watching(self, backend_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(backend: Any, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
                return backend_call(backend, module, inputs, **options)

            # The graph is copied, because backends modify the module.
            kept, number = copy.deepcopy(module), self.graphs
            compiled, found = compile_graph(module, inputs), list[Difference]()
            self.graphs += 1

            def run(*inputs: Any) -> Any:
                if self._patches is None or found:
                    return compiled(*inputs)
                eager = _EagerRuns(kept, inputs)
                results = compiled(*inputs)
                if not eager.plain:
                    self.not_compared["a graph that raises an error when it runs eagerly"] += 1
                elif differing := self._differing(eager, _readings(inputs, results)):
                    found.append(_difference(number, eager, differing, compile_graph))
                    self.differences.append(found[0])
                return results

            return run

        return call

    def _differing(self, eager: _EagerRuns, held: Mapping[Reading, Tensor]) -> Differing | None:
        """Return the first result that differs by more than rounding can explain."""
        for reading, value in held.items():
            kind, number = reading
            if kind == "input" and torch.equal(eager.plain[reading], eager.inputs[number]):
                # The graph has not changed this input.
                # Some CPU kernels write in place without bumping the version counter, so values are compared.
                continue
            if not value.is_floating_point():
                if not torch.equal(value, eager.plain[reading]):
                    self.not_compared["an integer result, which differs from eager code"] += 1
                continue
            self.compared += 1
            if found := eager.difference(reading, value):
                return reading, *found
        return None

    def report(self) -> str:
        """Return a string that says which results differ and what could not be compared."""
        lines = [f"compiled code differs from eager code in {difference}" for difference in self.differences]
        lines.append(
            f"{self.compared} results of {self.graphs} compiled graphs compared with eager code"
            + ("" if self.differences else ": rounding explains every difference")
        )
        if not self.graphs:
            lines = ["nothing was compiled: the program called no function that torch.compile had compiled"]
        if self.not_compared:
            lines.append(f"not compared: {listed(self.not_compared)}")
        return "\n\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-serializable values."""
        names = ("graphs", "compared", "differences", "not_compared")
        return {name: as_json(getattr(self, name)) for name in names}


Reading = tuple[str, int]
"""A compared tensor: the word ``"result"``, ``"input"`` or ``"gradient"`` (of an input), and its index."""

Differing = tuple[Reading, float, float]
"""A compared tensor, its relative difference from eager code, and the relative difference that is allowed."""


def _readings(inputs: Sequence[Any], results: Sequence[Any]) -> dict[Reading, Tensor]:
    """Return the results of a graph, its inputs after the call, and the gradients of its inputs."""
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


# The states of the random number generators of the CPU and, if CUDA has been used, of each CUDA device.
_RandomState = tuple[Tensor, Sequence[Tensor]]


def _random_state() -> _RandomState:
    """Return the states of torch's random number generators."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in _cuda_devices()]


@contextmanager
def _random_numbers_from(state: _RandomState) -> Iterator[None]:
    """Set torch's random number generators to ``state`` in a block, and restore them afterwards."""
    with torch.random.fork_rng(_cuda_devices()):
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state_all(state[1])
        yield


def _cuda_devices() -> range:
    """Return the indices of the CUDA devices, or an empty range if CUDA has not been used."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return range(torch.cuda.device_count() if used else 0)


class _EagerRuns:
    """Runs a graph in eager mode, on copies of the inputs of one call."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.inputs = list(map(_copied, inputs))
        self.module, self._random_state = module, _random_state()
        self.plain = self._run(Region(Tracker()))

    def _run(self, region: Region) -> dict[Reading, Tensor]:
        """Run the graph in a region that watches its ops.

        Return an empty dict if the graph raises an error.
        """
        inputs = list(map(_copied, self.inputs))
        try:
            with _random_numbers_from(self._random_state), region:
                return _readings(inputs, self.module(*inputs))
        except Exception:  # noqa: BLE001 -- whatever the user's graph raises
            return {}

    @cached_property
    def _rounded_otherwise(self) -> list[dict[Reading, Tensor]]:
        generators = [torch.Generator().manual_seed(seed) for seed in range(_NUDGES)]
        nudges = [SimpleNamespace(after=partial(_nudge, generator)) for generator in generators]
        runs, wide = [self._run(Region(Tracker(), nudge)) for nudge in nudges], WideRun(None, torch.float64)
        narrow = self._run(wide)
        with unwatched():
            exact = {key: wide.shadows.of(v) for key, v in narrow.items() if wide.shadows.follows(v)}
        return [*runs, exact]

    def difference(self, reading: Reading, value: Tensor) -> tuple[float, float] | None:
        """Return how far a result of compiled code differs from the eager result, and how far it may differ.

        Return None if rounding can explain the difference.
        """
        eager = self.plain.get(reading)
        if eager is None or value.numel() == 0:
            return None
        for order, times in ((2.0, 1.0), (torch.inf, _PEAK)):
            apart = distance(value, eager, order)
            allowed = times * _EPS * torch.finfo(value.dtype).eps
            if apart > allowed:
                others = [eager, *(run[reading] for run in self._rounded_otherwise if reading in run)]
                allowed += times * _TIMES * max(distance(other, eager, order) for other in others)
                if apart > allowed:
                    return apart, allowed
        return None


def _difference(
    graph: int, eager: _EagerRuns, differing: Differing, compile_graph: Callable[..., Any]
) -> Difference:
    """Describe a result that differs, and name the first op whose result differs from the eager result."""
    (kind, number), apart, allowed = differing
    inputs = [node for node in eager.module.graph.nodes if node.op == "placeholder"]
    output: Any = eager.module.graph.output_node().args[0]
    origin = _origin(eager, compile_graph)
    # If no single op's result differs, name the op next to the graph's differing output or input.
    node = origin or (output[number] if kind == "result" else next(iter(inputs[number].users), None))
    result = f"result {number}"
    if kind != "result":
        target = str(inputs[number].target)
        name = ".".join(_OWNED.findall(target)) or target
        result = f"the gradient of {name}" if kind == "gradient" else f"{name}, which it writes,"
    place = place_in_trace(node.stack_trace or "") if node else None
    return Difference(
        result=f"{result} of graph {graph} ({short_name(eager.plain[kind, number].dtype)})",
        op=str(getattr(node.target, "__name__", node.target)) if node else "",
        line=f"{place}: {place.text}" if place else "",
        relative=apart,
        allowed=allowed,
        reason=""
        if origin
        else "compiled separately, this op gives the right result; the error may come from how the compiler "
        "fuses it with other ops",
    )


def _origin(eager: _EagerRuns, compile_graph: Callable[..., Any]) -> fx.Node | None:
    """Return the first op whose compiled result differs from the eager result.

    To find the op, compile the graph again with the results of all ops as outputs.
    """
    module = copy.deepcopy(eager.module)
    output = module.graph.output_node()
    ops = [node for node in module.graph.nodes if node.op.startswith("call_")]
    ops = [node for node in ops if isinstance(node.meta.get("example_value"), Tensor)]
    output.args = (tuple(ops),)
    module.recompile()
    again = _EagerRuns(copy.deepcopy(module), eager.inputs)
    try:
        values = compile_graph(module, eager.inputs)(*map(_copied, eager.inputs))
    except Exception:  # noqa: BLE001 -- a backend may refuse such a graph
        return None
    for index, (node, value) in enumerate(zip(ops, values, strict=True)):
        if value.is_floating_point() and again.difference(("result", index), value) is not None:
            return node  # type: ignore[no-any-return]
    return None


def _nudge(generator: torch.Generator, call: Call, output: Any) -> None:
    """Multiply each element of an op's results by 1 + eps or 1 - eps at random. Views are not changed."""
    results = [] if call.traits.is_view else [made.tensor for made in call.made(output)]
    for result in results:
        if result.is_floating_point():
            up = torch.randint(0, 2, result.shape, generator=generator).to(result.device)
            result.mul_((1 + (2 * up - 1) * torch.finfo(result.dtype).eps).to(result.dtype))


def _copied(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return value.detach().clone().requires_grad_(value.requires_grad) if is_tensor else value
