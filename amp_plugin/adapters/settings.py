"""The options of an adapter, checked together, and what follows from them; the same for all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from amp_plugin.casting.rules import OpRules
from amp_plugin.messages import warn_user
from amp_plugin.options import PrecisionOptions, ScalingOptions, option_names
from amp_plugin.precision import TRAINING_DTYPES, PrecisionName, checked_precision, refuse_other_precision
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.sharding.fully_shard import add_up_in_fp32
from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.sharding.report import check_against_plan


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(PrecisionOptions):
    """Options in our own names: precisions by name, rules read from their file."""

    precision: str = ""
    eval_precision: PrecisionName | None = None
    rules: OpRules | None = None
    named: ClassVar[str] = "precision"  # how a program writes it

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.fp32_modules
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(name, str) and name for name in names):
            msg = f"fp32_modules={names!r} is not allowed; give a list of names: ['LayerNorm']"
            raise TypeError(msg)
        if self.precision:  # else it is not known yet
            refuse_other_precision(self.weights, self.precision, named=self.named)
        if self.eval_precision is not None:
            known = checked_precision("eval_precision", self.eval_precision)
            object.__setattr__(self, "eval_precision", known)
            refuse_other_precision(self.weights, known, named="eval_precision")
        if not isinstance(self.rules, OpRules | None):
            try:
                object.__setattr__(self, "rules", OpRules.from_yaml(self.rules))
            except (OSError, TypeError, ValueError) as error:
                msg = f"rules={self.rules!r}: {error}; give an OpRules or the path of a YAML file of rules"
                raise ValueError(msg) from error

    def check_sharded(self) -> None:
        """Raise ValueError if a model that FSDP shards is to be evaluated in another precision."""
        in_eval, precision = self.eval_precision, self.precision
        if in_eval is not None and in_eval != precision != "fp32":
            msg = (
                f"eval_precision={in_eval!r} does not work under FSDP, which gathers weights in "
                f"{precision!r} in evaluation too; leave eval_precision out"
            )
            raise ValueError(msg)

    def check_shards(self, model: nn.Module, *, for_ddp: str, warn: Callable[[str], Any] = warn_user) -> None:
        """Compare what shards a model with the plan; warn of ``reduce`` where nothing does."""
        if check_against_plan(model, self.dtype_plan):
            self.check_sharded()
            add_up_in_fp32(model)
        elif self.reduce != "fp32":
            warn(
                f"reduce={self.reduce!r} has an effect under FSDP only, and this model is not sharded: its "
                f"gradients are reduced in the dtype of the weights; for DDP use {for_ddp}"
            )

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype that training computes in; bfloat16 for fp8."""
        return TRAINING_DTYPES.get(self.precision, torch.float32)

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of a model, for the engine that shards it."""
        return DtypePlan(
            compute=self.training_dtype,  # type: ignore[arg-type] # a name is made of it
            fp32_modules=self.fp32_modules,
            reduce=self.reduce,
            weights=self.weights,
        )

    def new_scaler(self, device: str, *, enabled: bool) -> GradScaler:
        """Return a scaler with these options; a disabled one scales nothing, and still logs steps."""
        options = {name: getattr(self, name) for name in option_names(ScalingOptions)}
        return GradScaler(device, enabled=enabled, **options)
