"""How near each module's gradients come to the ends of what its dtype can hold.

Read after a step, where gradients are unscaled and clipped, and taken back to what the backward pass made:
times loss scale, divided by the clip. The largest number is exact; the share of zeros is that of at most 4096
elements per parameter. A read waits until all reads together have taken at most 0.25 % of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from amp_plugin.patterns import clean_name
from amp_plugin.run_page.history import halved
from amp_plugin.scaling.gradients import local_gradient
from amp_plugin.scaling.step_log import StepResult

BUDGET: Final = 0.0025
"""The share of a run's time that reads may take; writing the page may take as much again."""

_MOST_ELEMENTS = 4096
_MOST_COLUMNS = 360  # of the map; beyond, two neighbours become one
_MOST_ROWS = 250


class Column(NamedTuple):
    """The gradients of one step, or of some in a row: a number per module, nan where it has no gradient."""

    first: int
    last: int
    largest: Tensor  # of the scaled gradients, inf if one of them is not finite
    zeros: Tensor  # share of the elements


class Headroom:
    """What was read of a model's gradients."""

    def __init__(self, model: nn.Module) -> None:
        rows: dict[str, int] = {}
        self._row_of: dict[int, int] = {}
        for name, param in model.named_parameters():
            owner = clean_name(name).rpartition(".")[0]
            self._row_of[id(param)] = rows.setdefault(owner, len(rows))
        self.modules = list(rows)
        self._params = list(model.parameters())
        self.columns: list[Column] = []
        self.reads, self.seconds = 0, 0.0
        self._began = time.perf_counter()

    def is_due(self) -> bool:
        """Whether another read is within the budget; a first one always is."""
        return self.seconds <= BUDGET * (time.perf_counter() - self._began)

    def note_overflow(self, step: int, names: Iterable[str]) -> None:
        """Add a skipped step by the names of the parameters that overflowed; nothing is read."""
        owners = {clean_name(name).rpartition(".")[0] for name in names}
        largest = torch.tensor([math.inf if name in owners else math.nan for name in self.modules])
        if largest.isinf().any():
            self._add(Column(step, step, largest, torch.full_like(largest, math.nan)))

    def read(self, step: int, result: StepResult) -> None:
        """Read the gradients that a step has left."""
        start = time.perf_counter()
        gradients = [
            (self._row_of[id(param)], local_gradient(param)[0].detach())
            for param in self._params
            if param.grad is not None and param.grad.layout is torch.strided
        ]
        found = [(row, gradient) for row, gradient in gradients if gradient.numel()]
        if found:
            self._add(Column(step, step, *self._measured(found, _times_made(result))))
        self.reads += 1
        self.seconds += time.perf_counter() - start

    def _measured(self, found: list[tuple[int, Tensor]], factor: float) -> tuple[Tensor, Tensor]:
        largest = [math.nan] * len(self.modules)
        zeros, counts = torch.zeros(len(self.modules)), torch.zeros(len(self.modules))
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for row, gradient in found:
            groups.setdefault((gradient.device, gradient.dtype), []).append((row, gradient))
        for members in groups.values():
            rows = torch.tensor([row for row, _ in members])
            norms = torch._foreach_norm([gradient for _, gradient in members], math.inf)
            values = torch.stack(norms).float().cpu().nan_to_num(nan=math.inf) * factor
            for (row, _), value in zip(members, values.tolist(), strict=True):
                largest[row] = value if math.isnan(largest[row]) else max(largest[row], value)
            parts = [_some_of(gradient) for _, gradient in members]
            sizes = torch.tensor([len(part) for part in parts])
            is_zero = (torch.cat(parts) == 0).float().cpu()
            zeros = zeros.index_add(0, rows.repeat_interleave(sizes), is_zero)
            counts = counts.index_add(0, rows, sizes.float())
        return torch.tensor(largest), zeros / counts  # 0 / 0 is nan

    def _add(self, column: Column) -> None:
        self.columns.append(column)
        if len(self.columns) > _MOST_COLUMNS:
            self.columns = halved(self.columns, _joined)

    def bits(self, limits: Mapping[str, float]) -> Tensor:
        """Return, modules x columns, how often the largest gradient could double; -1 has overflowed."""
        if not self.columns:
            return torch.empty(len(self.modules), 0)
        largest = torch.stack([column.largest for column in self.columns], dim=1)
        limit = torch.tensor([[limits[name]] for name in self.modules], dtype=torch.float64)
        return (limit / largest).log2().clamp(min=-1.0)

    def zeros(self) -> Tensor:
        """Return, modules x columns, the share of elements that are zero."""
        parts = [column.zeros for column in self.columns]
        return torch.stack(parts, dim=1) if parts else torch.empty(len(self.modules), 0)

    def cells(self, limits: Mapping[str, float]) -> dict[str, Any]:
        """Return the map for a page: names and steps, and row by row the bits and the shares in percent."""
        bits, zeros = self.bits(limits), self.zeros()
        order = list(range(len(self.modules)))
        if len(order) > _MOST_ROWS:
            nearest = bits.nan_to_num(nan=math.inf).amin(dim=1).argsort()[:_MOST_ROWS]
            order = sorted(nearest.tolist())
        return {
            "modules": [self.modules[row] or "(model)" for row in order],
            "first": [column.first for column in self.columns],
            "last": [column.last for column in self.columns],
            "bits": [[_shown(bit, 1) for bit in bits[row].tolist()] for row in order],
            "zeros": [[_shown(100 * share, 1) for share in zeros[row].tolist()] for row in order],
        }


def _times_made(result: StepResult) -> float:
    """Return what turns the gradients that a step has left into those that the backward pass made."""
    before, after = result.norm, result.clipped_norm
    if before is None or after is None:
        return result.scale_before
    clipped = float(before) / float(after) if float(after) > 0 else 1.0
    return result.scale_before * (clipped if math.isfinite(clipped) else 1.0)


def _some_of(gradient: Tensor) -> Tensor:
    flat = gradient.flatten() if gradient.is_contiguous() else gradient.reshape(-1)
    return flat[:: math.ceil(flat.numel() / _MOST_ELEMENTS)]


def _joined(first: Column, second: Column) -> Column:
    zeros = torch.stack([first.zeros, second.zeros]).nanmean(dim=0)
    return Column(first.first, second.last, torch.fmax(first.largest, second.largest), zeros)


def _shown(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
