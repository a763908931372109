"""The dtypes of a model's weights, gradients and collectives, stated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from amp_plugin.patterns import matched_modules, require_matches
from amp_plugin.precision import (
    DTYPES,
    PrecisionName,
    ReduceName,
    WeightsName,
    checked_dtype,
    checked_reduce,
    checked_weights,
    refuse_other_precision,
)

REST: Final = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDtypes:
    """The dtypes of one module.

    Attributes:
        compute: Its weights are gathered in it, and its ops run in it where the op rules say so.
        stored: Its trainable weights between steps, and of each rank's shard.
        gradient: Of ``.grad`` when the optimizer steps.
        reduction: Gradients are added up in it, over ranks and over micro-batches that are not reduced.
    """

    compute: torch.dtype
    stored: torch.dtype
    gradient: torch.dtype
    reduction: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePlan:
    """Which dtypes a model computes, stores, adds up and reduces in.

    Attributes:
        compute: ``"fp16"``, ``"bf16"`` or ``"fp32"``; a torch.dtype is understood.
        fp32_modules: Names of modules (``"encoder.norm"``, wildcards allowed) or of module classes
            (``"LayerNorm"``) that compute in fp32 and whose weights are gathered in fp32.
        reduce: The dtype gradients are reduced in: ``"fp32"``, or ``"bf16"`` for half the bytes.
        weights: How trainable weights are stored, as in ``store_weights``; a sharded model stores float32.

    Raises:
        ValueError: A value is none of those allowed, or weights are not stored in the dtype computed in.
        TypeError: ``fp32_modules`` is one string.

    Example:
        >>> plan = DtypePlan(compute="bf16", fp32_modules=["LayerNorm"])
        >>> {pattern: str(dtypes.compute) for pattern, dtypes in plan.patterns().items()}
        {'LayerNorm': 'torch.float32', '*': 'torch.bfloat16'}
    """

    compute: PrecisionName = "bf16"
    fp32_modules: Sequence[str] = ()
    reduce: ReduceName = "fp32"
    weights: WeightsName = "fp32"

    def __post_init__(self) -> None:
        if isinstance(self.fp32_modules, str):
            msg = f"fp32_modules={self.fp32_modules!r} is one string; give a list: [{self.fp32_modules!r}]"
            raise TypeError(msg)
        object.__setattr__(self, "fp32_modules", tuple(self.fp32_modules))
        object.__setattr__(self, "compute", checked_dtype("compute", self.compute))
        object.__setattr__(self, "reduce", checked_reduce(self.reduce))
        object.__setattr__(self, "weights", checked_weights(self.weights))
        refuse_other_precision(self.weights, self.compute, named="compute")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of everything but ``fp32_modules``."""
        return DTYPES[self.compute]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype gradients are reduced in."""
        return DTYPES[self.reduce]

    def patterns(self) -> dict[str, PlannedDtypes]:
        """Return pattern -> dtypes; the first that matches a module counts, ``"*"`` is all the rest."""
        stored = DTYPES[self.weights.partition("-")[0]]
        rest = self._dtypes(self.compute_dtype, stored)
        in_fp32 = self._dtypes(torch.float32, torch.float32)
        return {**dict.fromkeys(self.fp32_modules, in_fp32), REST: rest}

    def modules(self, model: nn.Module) -> dict[str, PlannedDtypes]:
        """Return name -> dtypes for each module of a model; a module is in fp32 if one that holds it is.

        Args:
            model: Any; ``""`` is the model itself.

        Raises:
            ValueError: A pattern matches no module; the text names the nearest.
        """
        require_matches([model], self.fp32_modules)
        in_fp32 = matched_modules(model, self.fp32_modules)
        planned = self.patterns()
        rest, fp32 = planned[REST], self._dtypes(torch.float32, torch.float32)
        return {
            name: fp32 if any(holder in in_fp32 for holder in _holders(name)) else rest
            for name, _ in model.named_modules(remove_duplicate=False)
        }

    def _dtypes(self, compute: torch.dtype, stored: torch.dtype) -> PlannedDtypes:
        return PlannedDtypes(
            compute=compute, stored=stored, gradient=torch.float32, reduction=self.reduce_dtype
        )


def _holders(name: str) -> list[str]:
    """Return a module's name and those of the modules that hold it."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
