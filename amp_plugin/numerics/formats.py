"""Measure how formats below 16 bits, such as fp8, change the operands of Linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from typing_extensions import Self

from amp_plugin.formats.layers import format_of
from amp_plugin.formats.quantizers import BLOCK, quantize
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.values import as_json, unwatched

Key = tuple[str, str]  # module, operand


@dataclass(slots=True)
class OperandRange:
    """Measurements of how a format changes one operand of a layer, over all calls.

    Attributes:
        format: The name of the format, which is ``"fp8"``, ``"fp8-rowwise"``, ``"mxfp8"`` or ``"nvfp4"``.
        calls: The number of calls that were measured.
        largest: The largest finite magnitude (amax).
        smallest_scale: The smallest scale. A scale is the factor by which the 4- or 8-bit codes are
            multiplied.
        largest_scale: The largest scale.
        elements: The number of elements in all calls.
        underflowed: The number of nonzero elements that the format rounds to 0.
    """

    format: str
    calls: int = 0
    largest: float = 0.0
    smallest_scale: float = float("inf")
    largest_scale: float = 0.0
    elements: int = 0
    underflowed: int = 0

    def add(self, matrix: Tensor, *, is_gradient: bool) -> None:
        """Measure one operand. Scales are computed along the last dimension of the operand."""
        rounded, scales = quantize(matrix.contiguous(), self.format, is_gradient=is_gradient)
        scales = scales[scales.isfinite() & (scales > 0)]
        self.calls += 1
        self.largest = max(self.largest, float(matrix.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
        if scales.numel():
            self.smallest_scale = min(self.smallest_scale, float(scales.min()))
            self.largest_scale = max(self.largest_scale, float(scales.max()))
        self.elements += matrix.numel()
        self.underflowed += int(((rounded == 0) & (matrix != 0)).sum())

    @property
    def underflow(self) -> float:
        """The fraction of all elements that underflow to 0."""
        return self.underflowed / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        """Return one line with the format, amax, scales and underflow."""
        scales = f"{self.smallest_scale:.1e}"
        if self.largest_scale != self.smallest_scale:
            scales += f" to {self.largest_scale:.1e}"
        return f"{self.format}, amax {self.largest:.1e}, scale {scales}, underflow {self.underflow:.1%}"


def input_range(name: str, given: Sequence[Any]) -> OperandRange:
    """Measure how a format changes a layer's input, which is the first tensor among the layer's arguments."""
    found = OperandRange(name)
    tensor = next((leaf for leaf in given if isinstance(leaf, Tensor)), None)
    if tensor is not None:
        _measure(found, tensor, is_gradient=False)
    return found


def _measure(found: OperandRange, tensor: Tensor, *, is_gradient: bool) -> None:
    with unwatched():
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        if matrix.numel() and not matrix.shape[1] % BLOCK.get(found.format, 1):
            found.add(matrix, is_gradient=is_gradient)


class FormatLog:
    """Measures the operands of layers that ``convert`` has converted. See ``log_formats``.

    A ``FormatLog`` can be used as a context manager or as an observer of a
    :class:`~amp_plugin.numerics.op.Region`.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._own = tracker, ExitStack()
        self._ranges: dict[Key, OperandRange] = {}

    def __enter__(self) -> Self:
        """Start to measure."""
        self._tracker.open(self._own)
        self.open(self._own)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring."""
        self._own.close()

    def open(self, stack: ExitStack) -> None:
        """Register a hook on all modules. Closing ``stack`` removes the hook."""
        stack.callback(register_module_forward_hook(self._called).remove)

    def _called(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = format_of(module)
        if not name or not args or not isinstance(args[0], Tensor):
            return
        layer: Any = module
        path = self._tracker.name_of(module)
        self._add(path, "input", name, args[0])
        self._add(path, "weight", name, layer.weight)
        if isinstance(output, Tensor) and output.requires_grad:
            add = partial(self._add, path, "gradient", name)  # backward may run after the region
            output.register_hook(add)  # type: ignore[no-untyped-call]

    def _add(self, path: str, operand: str, name: str, tensor: Tensor) -> None:
        found = self._ranges.setdefault((path, operand), OperandRange(name))
        _measure(found, tensor, is_gradient=operand == "gradient")

    def ranges(self) -> dict[Key, OperandRange]:
        """Map each (module, operand) to its measurements. Entries that were measured first come first."""
        return dict(self._ranges)

    def format_of(self, path: str) -> str:
        """Return the format of the layer at this path; empty if the layer computes in 16 bits or more."""
        return next((found.format for (module, _), found in self._ranges.items() if module == path), "")

    def table(self) -> Table:
        """Return a ``rich`` table with a row for each operand of each converted layer."""
        table = Table(title="Layers below 16 bits", box=None, pad_edge=False, title_justify="left")
        for column in ("module", "format", "operand"):
            table.add_column(column)
        for column in ("amax", "scale from", "to", "underflow"):
            table.add_column(column, justify="right", no_wrap=True)
        for (module, operand), found in self._ranges.items():
            scales = f"{found.smallest_scale:.1e}", f"{found.largest_scale:.1e}"
            cells = f"{found.largest:.1e}", *scales, f"{found.underflow:.1%}"
            table.add_row(module, found.format, operand, *cells)
        return table

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the measurements as JSON-serializable values."""
        return [
            {"module": module, "operand": operand, "underflow": found.underflow, **as_json(found)}
            for (module, operand), found in self._ranges.items()
        ]


def log_formats(model: nn.Module | None = None) -> FormatLog:
    """Measure how formats below 16 bits change the operands of converted layers in a region.

    The input, the weight and the gradient of the output are measured for each layer that ``convert`` or
    ``precision=`` has converted. The measurements are amax, the range of the scales, and the fraction of
    elements that become 0. The program's numbers do not change. Each call waits for the device.

    Args:
        model: The model from which module names are taken. By default, names begin with the class of the
            outermost module that is called.

    Returns:
        A context manager whose methods ``ranges()``, ``table()`` and ``to_dict()`` return the measurements.

    Example:
        >>> import torch
        >>> from amp_plugin import convert
        >>> model = convert(nn.Sequential(nn.Linear(32, 32)), "mxfp8", emulate=True)
        >>> with log_formats(model) as log:
        ...     model(torch.ones(32, 32)).sum().backward()
        >>> print(log.ranges()["0", "input"])
        mxfp8, amax 1.0e+00, scale 3.9e-03, underflow 0.0%
    """
    return FormatLog(Tracker(model))
