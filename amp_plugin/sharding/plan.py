"""Defines DtypePlan, the dtypes of a model's weights, gradients and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from amp_plugin.patterns import matched_modules, require_matches
from amp_plugin.precision import (
    DTYPES,
    PrecisionName,
    ReduceName,
    WeightsName,
    checked_word,
    refuse_other_precision,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePlan:
    """The dtypes in which a sharded model computes, stores its weights, and reduces its gradients.

    Attributes:
        compute: ``"fp16"``, ``"bf16"`` or ``"fp32"``, or the torch.dtype.
        fp32_modules: Names of modules (``"encoder.norm"``, wildcards allowed) or of module classes
            (``"LayerNorm"``). Modules in ``fp32_modules`` compute in fp32, and FSDP gathers their weights in
            fp32.
        reduce: The dtype in which gradients are reduced and accumulated. ``"bf16"`` sends half as many bytes
            as ``"fp32"``.
        weights: How trainable weights are stored, as in ``store_weights``. FSDP1 supports only ``"fp32"``.

    Raises:
        ValueError: An option has an invalid value, or ``weights`` and ``compute`` name different 16-bit
            dtypes.
        TypeError: ``fp32_modules`` is a single string instead of a list.

    Example:
        >>> plan = DtypePlan(compute="bf16", fp32_modules=["LayerNorm"])
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> plan.compute_dtype, plan.in_fp32(model) == {model[1]}
        (torch.bfloat16, True)
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
        for name, allowed in (("compute", PrecisionName), ("reduce", ReduceName), ("weights", WeightsName)):
            object.__setattr__(self, name, checked_word(name, getattr(self, name), allowed))
        refuse_other_precision(self.weights, self.compute, named="compute")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model computes, except for ``fp32_modules``."""
        return DTYPES[self.compute]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced and accumulated over micro-batches."""
        return DTYPES[self.reduce]

    def in_fp32(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules that stay in fp32, which are ``fp32_modules`` and all their submodules.

        Args:
            model: The model to which the names refer. With ``compute="fp32"`` all modules of the model stay
                in fp32.

        Raises:
            ValueError: A pattern matches no module. The error message suggests the most similar module name.
        """
        require_matches([model], self.fp32_modules)
        whole = [model] if self.compute_dtype is torch.float32 else []
        holders = [*whole, *matched_modules(model, self.fp32_modules).values()]
        return {module for holder in holders for module in holder.modules()}
