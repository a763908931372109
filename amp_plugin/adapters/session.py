"""Session: one run in one precision, the same for every front door."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from amp_plugin.casting.rules import OpRules
from amp_plugin.messages import OptionError, warn_user
from amp_plugin.options import LossScaleOptions, PrecisionOptions, option_names
from amp_plugin.precision import TRAINING_DTYPES, PrecisionName
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.sharding.fully_shard import add_up_in_fp32
from amp_plugin.sharding.plan import DtypePlan
from amp_plugin.sharding.report import check_against_plan

_NOTHING: Final[Mapping[str, str]] = {}


class Session:
    """One run in one precision, which a front door holds.

    Args:
        options: the options of the front door, checked.
        precision: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp8"``.
        sources: option -> what has set it; an option that nothing has set is absent.
        enabled: False scales no loss, in fp16 too.
    """

    def __init__(
        self,
        options: PrecisionOptions,
        precision: str,
        *,
        sources: Mapping[str, str] = _NOTHING,
        enabled: bool = True,
    ) -> None:
        self.options = options
        self.precision = precision
        self.sources = sources
        self.enabled = enabled

    # -- what follows from the options -----------------------------------------------------------

    @property
    def eval_precision(self) -> PrecisionName:
        """The precision of models in evaluation."""
        return cast("PrecisionName", self.options.eval_precision or self.precision)

    @property
    def rules(self) -> OpRules | None:
        """The op rules of the run; None for the default ones."""
        return cast("OpRules | None", self.options.rules)

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale: fp16 only."""
        return self.precision == "fp16"

    @property
    def changes_forward(self) -> bool:
        """Whether models compute in 16 bits, in training or in ``eval()`` mode."""
        return self.precision != "fp32" or self.eval_precision in {"fp16", "bf16"}

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype that training computes in; bfloat16 for fp8."""
        return TRAINING_DTYPES[self.precision]

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of a model, for the engine that shards it."""
        return DtypePlan(
            compute=self.training_dtype,  # type: ignore[arg-type] # a name is made of it
            fp32_modules=self.options.fp32_modules,
            reduce=self.options.reduce,
            weights=self.options.weights,
        )

    def new_scaler(self, device: str, *, enabled: bool) -> GradScaler:
        """Return a scaler with these options; a disabled one scales nothing, and still logs steps."""
        options = {name: getattr(self.options, name) for name in option_names(LossScaleOptions)}
        return GradScaler(device, enabled=enabled and self.enabled, **options)

    # -- models that are sharded -----------------------------------------------------------------

    def check_sharded(self) -> None:
        """Raise OptionError if a model that FSDP shards is to be evaluated in another precision."""
        in_eval, precision = self.eval_precision, self.precision
        if in_eval != precision != "fp32":
            msg = (
                f"eval_precision={in_eval!r} does not work under FSDP, which gathers weights in "
                f"{precision!r} in evaluation too; leave eval_precision out"
            )
            error = OptionError("eval_precision", in_eval, repr(precision), msg)
            error.set_by(self.sources)
            raise error

    def check_shards(self, model: nn.Module, *, for_ddp: str, warn: Callable[[str], Any] = warn_user) -> None:
        """Compare what shards a model with the plan; warn of ``reduce`` where nothing does."""
        reduce = self.options.reduce
        if check_against_plan(model, self.dtype_plan):
            self.check_sharded()
            add_up_in_fp32(model)
        elif reduce != "fp32":
            warn(
                f"reduce={reduce!r} has an effect under FSDP only, and this model is not sharded: its "
                f"gradients are reduced in the dtype of the weights; for DDP use {for_ddp}"
            )
