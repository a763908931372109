"""Measure how close each module's gradients come to the limits of their dtype.

Gradients are read after the optimizer step, when they are already unscaled and clipped. Multiplying the
gradients by the loss scale and dividing them by the clip factor restores the values that the backward pass
computed. The largest magnitude is exact. The fraction of zeros is estimated from a sample of the elements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from amp_plugin.numerics.module_hooks import prefixes
from amp_plugin.patterns import clean_name
from amp_plugin.precision import short_name
from amp_plugin.scaling.gradients import local_gradient
from amp_plugin.scaling.step_log import StepResult

BUDGET: Final = 0.0025
"""The fraction of a run's time that reading gradients may take.

Writing the HTML file may take the same fraction.
"""

_MOST_ELEMENTS = 4096  # the size of the sample per parameter
_MOST_COLUMNS = 360  # the map has at most this many columns
_MOST_ROWS = 250
_FAR = 16  # in bf16 and fp32, a module with more bits of headroom than this is not mentioned


def named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters of models, without the names of wrappers such as ``_orig_mod``.

    If there are several models, each name begins with its model, as in ``Critic[1].layer.weight``.
    """
    for prefix, model in prefixes(models):
        for name, param in model.named_parameters():
            yield prefix + clean_name(name), param


class Headroom:
    """Records the largest gradient of each module and the share of zeros in its gradients."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        rows: dict[str, int] = {}
        self._row_of = {
            param: rows.setdefault(_owner(name), len(rows)) for name, param in named_parameters(models)
        }
        self.modules = list(rows)
        self.first: list[int] = []  # the first optimizer step of each column of the heat map
        self.last: list[int] = []
        # Tensors of shape (modules, heat-map columns). An entry is nan if the module had no gradient.
        self._largest = self._zeros = torch.empty(len(rows), 0)
        self.reads, self.seconds = 0, 0.0
        self._began = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether the time budget allows another read of the gradients. It allows the first read."""
        return self.seconds <= BUDGET * (time.perf_counter() - self._began)

    def note_overflow(self, step: int, names: Iterable[str]) -> None:
        """Add a skipped step to the heat map, given the names of the parameters whose gradients overflowed.

        No gradient is read.
        """
        owners = {_owner(name) for name in names}
        largest = torch.tensor([math.inf if name in owners else math.nan for name in self.modules])
        if largest.isinf().any():
            self._add(step, largest, torch.full_like(largest, math.nan))

    def read(self, step: int, result: StepResult) -> None:
        """Read the gradients after a step."""
        start = time.perf_counter()
        found = {
            local_gradient(param)[0].detach(): row
            for param, row in self._row_of.items()
            if param.grad is not None and param.grad.layout is torch.strided
        }
        if found := {gradient: row for gradient, row in found.items() if gradient.numel()}:
            self._measure(step, torch.tensor([*found.values()]), [*found], _times_made(result))
        self.reads += 1
        self.seconds += time.perf_counter() - start

    def _measure(self, step: int, rows: Tensor, gradients: list[Tensor], factor: float) -> None:
        parts = [grad.reshape(-1)[:: math.ceil(grad.numel() / _MOST_ELEMENTS)] for grad in gradients]
        norms = _on_host(torch._foreach_norm(gradients, math.inf)).nan_to_num(nan=math.inf) * factor
        shares = _on_host([(part == 0).float().mean() for part in parts])
        sizes = torch.tensor([float(len(part)) for part in parts])
        nothing, empty = torch.full((len(self.modules),), math.nan), torch.zeros(len(self.modules))
        zeros = empty.index_add(0, rows, shares * sizes) / empty.index_add(0, rows, sizes)  # 0 / 0 is nan
        self._add(step, nothing.scatter_reduce(0, rows, norms, "amax", include_self=False), zeros)

    def _add(self, step: int, largest: Tensor, zeros: Tensor) -> None:
        """Add a column to the heat map.

        If the heat map has its maximum width, neighbouring columns are first merged in pairs.
        """
        if len(self.first) == _MOST_COLUMNS:
            self.first, self.last = self.first[::2], self.last[1::2]
            self._largest = torch.fmax(self._largest[:, ::2], self._largest[:, 1::2])
            self._zeros = torch.stack([self._zeros[:, ::2], self._zeros[:, 1::2]]).nanmean(dim=0)
        self.first.append(step)
        self.last.append(step)
        self._largest = torch.cat([self._largest, largest[:, None]], dim=1)
        self._zeros = torch.cat([self._zeros, zeros[:, None]], dim=1)

    def bits(self, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        """Return how many times the largest gradient could be doubled before it overflows.

        The result has the shape (modules, heat-map columns). An entry is -1 if the gradient has overflowed.
        """
        limits = [[torch.finfo(dtypes[name]).max] for name in self.modules]
        return (torch.tensor(limits, dtype=torch.float64) / self._largest).log2().clamp(min=-1.0)

    def nearest(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """Return a list with one sentence about the module closest to overflow, ignoring skipped steps.

        If no module came near overflow, return an empty list.
        """
        bits = self.bits(dtypes).nan_to_num(nan=math.inf, posinf=math.inf)
        bits[:, (bits < 0).any(dim=0)] = math.inf
        if not bits.isfinite().any():
            return []
        row, column = divmod(int(bits.argmin()), len(self.first))
        if bits[row, column] > _FAR and torch.finfo(dtypes[self.modules[row]]).max > 1e38:
            return []  # no gradient is near the limit of its dtype
        name = self.modules[row]
        percent = 100 * 2 ** -bits[row, column].item()
        share = f"{math.floor(percent)} %" if percent >= 10 else f"{percent:.2g} %"
        share = share if percent >= 0.01 else "less than 0.01 %"
        dtype, largest = short_name(dtypes[name]), torch.finfo(dtypes[name]).max
        limit = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.2g}"
        at = f"at step {self.first[column]}, the largest gradient in its backward pass"
        module = f"module {name}" if name else "(model)"
        return [f"{module}: {at} reached {share} of the largest {dtype} number ({limit})"]

    def cells(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
        """Return the heat map as a dict of module names, steps, bits of headroom and percentages of zeros."""
        bits = self.bits(dtypes)
        padded = nn.functional.pad(bits.nan_to_num(nan=math.inf), (0, 1), value=math.inf)
        order = sorted(padded.amin(dim=1).argsort()[:_MOST_ROWS].tolist())
        return {
            "modules": [self.modules[row] or "(model)" for row in order],
            "first": self.first,
            "last": self.last,
            "bits": [[shown(value, ".1f") for value in bits[row].tolist()] for row in order],
            "zeros": [[shown(value, ".1f") for value in (100 * self._zeros[row]).tolist()] for row in order],
        }


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _on_host(numbers: Iterable[Tensor]) -> Tensor:
    numbers = list(numbers)
    return torch.stack([number.to(numbers[0].device, torch.float32) for number in numbers]).cpu()


def _times_made(result: StepResult) -> float:
    """Return the factor by which gradients after a step are multiplied to undo unscaling and clipping."""
    before, after = result.norm, result.clipped_norm
    if before is None or after is None:
        return result.scale_before
    clipped = float(before) / float(after) if float(after) > 0 else 1.0
    return result.scale_before * (clipped if math.isfinite(clipped) else 1.0)


def shown(value: Tensor | float | None, digits: str = ".5g") -> float | None:
    """Return a number rounded to the given number of digits, or None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(format(float(value), digits))
