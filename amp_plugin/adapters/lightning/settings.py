"""What a user may set on AmpPrecision, checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from amp_plugin.adapters.float8 import checked_config
from amp_plugin.adapters.option_checks import rules_from
from amp_plugin.options import LightningOptions, LossScaleOptions, option_defaults
from amp_plugin.precision import (
    STOCK_NAMES,
    TRAINING_DTYPES,
    PrecisionName,
    TrainingPrecision,
    checked_precision,
    checked_reduce,
    checked_training_precision,
    checked_weights,
    refuse_other_precision,
    weights_meant,
)
from amp_plugin.sharding.dtype_plan import DtypePlan

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(LightningOptions):
    """The options of AmpPrecision and FabricAmpPrecision, checked, in our own names."""

    precision: TrainingPrecision = "fp16"
    eval_precision: PrecisionName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device is not None:
            _check_device(self.device)
        _check_names("fp32_modules", self.fp32_modules)
        object.__setattr__(self, "weights", checked_weights(self.weights))
        refuse_other_precision(self.weights, self.precision)
        if self.eval_precision is not None:
            refuse_other_precision(self.weights, self.eval_precision, named="eval_precision")
        object.__setattr__(self, "reduce", checked_reduce(self.reduce))
        if self.rules is not None:
            object.__setattr__(self, "rules", rules_from(self.rules))

    @classmethod
    def from_arguments(cls, owner: str, given: Mapping[str, Any]) -> Self:
        """Check the arguments of a plugin.

        Args:
            owner: the plugin's class.
            given: the arguments that were given, by name.
        """
        stated = {**option_defaults(LightningOptions), **given}
        precision = checked_training_precision(stated["precision"])
        in_eval = stated["eval_precision"]
        return cls(
            **stated
            | {
                "precision": precision,
                "eval_precision": None if in_eval is None else checked_precision("eval_precision", in_eval),
                "weights": weights_meant(stated["precision"], stated["weights"]),
                "scaler": None,
                "float8_config": (
                    checked_config(f"{owner}('fp8')", stated["float8_config"]) if precision == "fp8" else None
                ),
            }
        )

    @property
    def loss_scale(self) -> LossScaleOptions:
        """The options of the loss scale."""
        return LossScaleOptions.among(vars(self))

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype that training computes in; bfloat16 for fp8."""
        return TRAINING_DTYPES[self.precision]

    @property
    def op_rules(self) -> OpRules | None:
        """The rules, read from their file."""
        return self.rules  # type: ignore[return-value]

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of a model, for the engine that shards it."""
        return DtypePlan(
            compute=self.training_dtype,  # type: ignore[arg-type] # a name is made of it
            fp32_modules=self.fp32_modules,
            reduce=self.reduce,
            weights=self.weights,
        )

    @property
    def stock_name(self) -> str:
        """Lightning's own name for the training precision, e.g. ``"16-mixed"``."""
        return STOCK_NAMES[self.precision]

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale: fp16 only."""
        return self.precision == "fp16"


def _check_names(option: str, given: object) -> None:
    if isinstance(given, str):
        msg = f"{option}={given!r} is one string; give a list: [{given!r}]"
        raise TypeError(msg)
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        msg = f"{option}={given!r} is not allowed; give a list of names"
        raise TypeError(msg)


def _check_device(given: str) -> None:
    known = ("cpu", "cuda", "xpu", "mps")
    if given not in known:
        hint = " (a device type, without an index)" if ":" in str(given) else ""
        allowed = ", ".join(map(repr, known))
        msg = f"device={given!r} is unknown; allowed are {allowed}{hint}, or None for the model's device"
        raise ValueError(msg)
