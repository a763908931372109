"""Which ops lose precision, and what of it arrives: each op of a program runs in fp32 or fp64, too.

A storage has one flat shadow: the values it would have without rounding to 16 bits. A tensor's shadow is a
view of that
with the tensor's own strides, so views, writes in place and what autograd saves need no care.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from amp_plugin.numerics.modules import Modules
from amp_plugin.numerics.op import Argument, Call, OpTraits, Region, arguments_of, results_of
from amp_plugin.numerics.rounding import Errors, draw
from amp_plugin.numerics.values import PLAIN, Storages, is_low_precision, unwatched
from amp_plugin.precision import short_name

Key = tuple[str, str, str]  # module, op, direction

_DTYPES = (torch.float32, torch.float64)


class ShadowValues:
    """Values in a wider dtype next to the tensors of a program.

    Args:
        dtype: fp32 or fp64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._flat: Storages[Tensor] = Storages()

    def follows(self, tensor: object) -> bool:
        """Return whether a value has a shadow: a dense floating-point tensor no wider than it."""
        return (
            isinstance(tensor, Tensor)
            and type(tensor) in PLAIN  # others hold plain ones, or no memory
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and not tensor.is_meta
            and not tensor.is_nested
            and tensor.element_size() <= self.dtype.itemsize
            and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow, of its shape; one without a shadow gets its own values, exactly."""
        flat = self._flat.get(tensor)
        if flat is None or flat.numel() != tensor.untyped_storage().nbytes() // tensor.element_size():
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            flat = whole.to(self.dtype, copy=True)
            self._flat.set(tensor, flat)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Make values a tensor's shadow."""
        self.of(tensor).copy_(values)

    def reset(self, tensor: Tensor) -> None:
        """Make a tensor's own values its shadow."""
        self.of(tensor).copy_(tensor)

    def widened(self, value: Any) -> Any:
        """Return an argument on the side of the shadow: wide tensors and dtypes, all else as it is."""
        if isinstance(value, Tensor):
            return self.of(value) if self.follows(value) else value
        if isinstance(value, torch.dtype):
            return self.dtype if is_low_precision(value) or value is torch.float32 else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.widened(entry) for entry in value)
        return value

    def exact(self, value: Any) -> Any:
        """Return the same with the program's own values: an op's own error is against these."""
        if isinstance(value, Tensor):
            return value.to(self.dtype) if self.follows(value) else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.exact(entry) for entry in value)
        return self.widened(value)


class Shadow:
    """Run every op twice more in a wide dtype: on its inputs, and on those of a run without rounding.

    Args:
        dtype: the wide dtype, fp32 or fp64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.errors: dict[Key, Errors] = {}
        self.not_compared: dict[str, int] = {}
        self._shadows = ShadowValues(dtype)

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow, of its shape."""
        return self._shadows.of(tensor)

    def before(self, call: Call) -> None:
        """Widen the arguments, which the op may write."""
        if not call.traits.is_view and self._is_computed(call.traits, call.arguments):
            call.kept = self._sides(call.traits, call.args, call.kwargs)

    def failed(self, call: Call) -> None:
        """Do nothing: a call that raised has no result to compare."""

    def after(self, call: Call, output: Any) -> None:
        """Run the op on both wide sides."""
        if call.traits.is_view:
            return
        written = [argument for argument in call.arguments if argument.name in call.traits.written]
        results = [*written, *results_of(output)]
        followed = [result for result in results if self._shadows.follows(result.tensor)]
        if call.kept is None or not followed:
            if followed and self._is_a_loss(call.traits, call.arguments):
                self._count(call.traits)
            self._own_values(followed)
        else:
            self._compare(call, results)

    @staticmethod
    def _is_computed(traits: OpTraits, arguments: list[Argument]) -> bool:
        """Return whether the op can run again: it draws no numbers and sends nothing."""
        return bool(arguments) and not (traits.is_random or traits.is_collective or traits.is_unwritten)

    @staticmethod
    def _is_a_loss(traits: OpTraits, arguments: list[Argument]) -> bool:
        """Return whether errors are lost if the op is not run again: it reads its arguments."""
        return not traits.is_unwritten and any(a.name not in traits.overwritten for a in arguments)

    def _count(self, traits: OpTraits) -> None:
        self.not_compared[traits.name] = self.not_compared.get(traits.name, 0) + 1

    def _sides(self, traits: OpTraits, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the op's arguments as wide tensors: with the program's values, and with the other run's."""
        if traits.base in {"_softmax", "_log_softmax"}:
            args = (*args[:2], False)  # half_to_float: of a half tensor only
        exact = self._shadows.exact([*args]), {name: self._shadows.exact(v) for name, v in kwargs.items()}
        arriving = (
            self._shadows.widened([*args]),
            {name: self._shadows.widened(v) for name, v in kwargs.items()},
        )
        if traits.written:  # the shadow is written afterwards, by what this copy holds
            arriving = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arriving)
            exact = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, exact)
        return exact, arriving

    def _own_values(self, results: list[Argument]) -> None:
        for result in results:
            self._shadows.reset(result.tensor)

    def _compare(self, call: Call, results: list[Argument]) -> None:
        """Run the op on both wide sides, add up the errors, and write the results' shadows."""
        traits = call.traits
        try:
            exact, arriving = (self._results(call, *side) for side in call.kept)
            if [len(exact), len(arriving)] != [len(results)] * 2:
                raise RuntimeError(traits.name)  # noqa: TRY301 - counted below like any other
        except (RuntimeError, TypeError, NotImplementedError):
            self._count(traits)
            self._own_values([result for result in results if self._shadows.follows(result.tensor)])
            return
        seen: set[int] = set()
        for result, same, other in zip(results, exact, arriving, strict=True):
            if not self._shadows.follows(result.tensor) or id(result.tensor) in seen:
                continue
            seen.add(id(result.tensor))
            if result.tensor.numel() and is_low_precision(result.tensor.dtype):
                self._errors(call).add(result.tensor, same, other)
            self._shadows.write(result.tensor, other)

    @staticmethod
    def _results(call: Call, args: Any, kwargs: Any) -> list[Tensor]:
        output = call.func(*args, **kwargs)
        written = [a.tensor for a in arguments_of(call.traits, args, kwargs) if a.name in call.traits.written]
        return [*written, *(result.tensor for result in results_of(output))]

    def _errors(self, call: Call) -> Errors:
        return self.errors.setdefault((call.site.module, call.traits.name, call.direction), Errors())


class ShadowRun(Region):
    """A region whose ops run in a wide dtype, too; see ``shadow_run``."""

    def __init__(self, model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in _DTYPES:
            msg = f"shadow_run(dtype={dtype}): give torch.float32, or torch.float64 for a program in fp32"
            raise ValueError(msg)
        self._shadow = Shadow(dtype)
        super().__init__(Modules(model), self._shadow)

    def errors(self) -> dict[Key, Errors]:
        """Return the errors of each (module, op, direction), the largest own error first."""
        return dict(sorted(self._shadow.errors.items(), key=lambda row: (-row[1].own, -row[1].arriving)))

    def without_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor of the program would hold without rounding: a copy in the wide dtype.

        Args:
            tensor: dense, floating-point; one that no op of the region made has its own values.
        """
        with unwatched():
            return self._shadow.value_of(tensor).clone()

    def not_compared(self) -> dict[str, int]:
        """Return how often ops could not be run again in the wide dtype; their results are taken as exact."""
        return dict(self._shadow.not_compared) | dict(self.recorder.unseen)

    def table(self, rows: int | None = 20) -> Table:
        """Return a rich table, the largest own error first.

        Args:
            rows: how many; None for all.
        """
        errors = list(self.errors().items())
        table = Table(title="Errors", box=None, pad_edge=False, show_header=True)
        for column in ("module", "op", "pass", "in"):
            table.add_column(column)
        for column in ("calls", "own", "own/eps", "arriving", "underflow", "headroom"):
            table.add_column(column, justify="right", no_wrap=True)
        for (module, op, direction), found in errors[:rows]:
            table.add_row(*_cells(module, op, direction, found))
        hidden = len(errors) - len(errors[:rows])
        notes = [f"{hidden} rows with smaller errors"] if hidden else []
        if not errors:
            notes = ["no op returned a 16-bit result: was the code in an autocast block?"]
        if self.not_compared():
            ops = (f"{op} ({calls} {_plural('call', calls)})" for op, calls in self.not_compared().items())
            notes.append(f"passed on as exact, not measured: {', '.join(ops)}")
        table.caption = "; ".join(notes) or None
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values, histograms of exponents included."""
        rows = [
            {"module": module, "op": op, "pass": direction, **errors.to_dict()}
            for (module, op, direction), errors in self.errors().items()
        ]
        return {"rows": rows, "not_compared": self.not_compared()}

    def plot(self, path: str | Path, *, rows: int = 20) -> None:
        """Draw errors and exponents of the rows with the largest own error.

        Args:
            path: a file; its ending says the format.
            rows: how many.

        Raises:
            ImportError: matplotlib is not installed.
        """
        draw(dict(list(self.errors().items())[:rows]), Path(path))


def shadow_run(model: nn.Module | None = None, *, dtype: torch.dtype = torch.float32) -> ShadowRun:
    """Run each op of a region in a wide dtype, too, and measure what 16 bits cost.

    Each op runs three times: as it is, in the wide dtype on the same inputs (the op's own error), and in the
    wide dtype on what a run without rounding would have given it (what arrives). Listed are ops that return
    16 bits.
    The program's own results are not changed. Memory: the wide values of every living tensor.

    Ops that draw numbers from tensors, collectives, and ops without a kernel for the wide dtype are not
    measured, and pass their results on as exact; ``not_compared()`` counts them. Of a DTensor each rank
    measures its own shard.

    Args:
        model: gives the module names; default: whatever module is called, its class in front.
        dtype: the wide dtype, ``torch.float32`` or ``torch.float64``.

    Returns:
        A context manager; read it with ``errors()``, ``table()``, ``to_dict()`` and ``plot(path)``.

    Raises:
        ValueError: another dtype.

    Example:
        >>> with shadow_run() as run:
        ...     y = torch.tensor([1.0, 1e-9]).half()
        >>> [(op, errors.underflowed) for (_, op, _), errors in run.errors().items()]
        [('aten::_to_copy.default', 1)]
    """
    return ShadowRun(model, dtype=dtype)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _cells(module: str, op: str, direction: str, errors: Errors) -> tuple[str, ...]:
    return (
        module or "(no module)",
        op.removeprefix("aten::").removesuffix(".default"),
        direction,
        short_name(errors.narrow),
        f"{errors.calls:,}",
        f"{errors.own:.1e}",
        f"{errors.own_in_eps:.2f}",
        f"{errors.arriving:.1e}",
        f"{errors.underflowed / errors.elements:.1%}",
        f"{errors.headroom:.1f} bits",
    )
