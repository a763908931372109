"""What a user may set on AmpPrecision, checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from amp_plugin.adapters.float8 import checked_config
from amp_plugin.adapters.option_checks import flag, number, rules_from
from amp_plugin.precision import (
    STOCK_NAMES,
    TRAINING_DTYPES,
    PrecisionName,
    ReduceName,
    TrainingPrecision,
    checked_precision,
    checked_reduce,
    checked_training_precision,
    checked_weights,
    refuse_other_precision,
    weights_meant,
)
from amp_plugin.scaling.loss_scale_options import LossScaleOptions, OnNonfinite, checked_on_nonfinite
from amp_plugin.sharding.dtype_plan import DtypePlan

if TYPE_CHECKING:
    from pathlib import Path

    from amp_plugin.casting.rules import OpRules
    from amp_plugin.precision import WeightsName


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSettings:
    """The options of AmpPrecision and FabricAmpPrecision, which say what each does."""

    precision: TrainingPrecision
    eval_precision: PrecisionName | None = None
    device: str | None = None
    rules: OpRules | str | Path | None = None
    fp32_modules: Sequence[str] = ()
    weights: WeightsName = "fp32"
    reduce: ReduceName = "fp32"
    exact_schedulers: bool = False
    float8_config: Any = None
    loss_scale: LossScaleOptions
    fp16_gradients: bool = False
    one_pass: bool = True
    on_nonfinite: OnNonfinite = "skip"

    def __post_init__(self) -> None:
        if self.device is not None:
            _check_device(self.device)
        _check_names("fp32_modules", self.fp32_modules)
        object.__setattr__(self, "weights", checked_weights(self.weights))
        refuse_other_precision(self.weights, self.precision)
        if self.eval_precision is not None:
            refuse_other_precision(self.weights, self.eval_precision, named="eval_precision")
        object.__setattr__(self, "reduce", checked_reduce(self.reduce))
        flag("exact_schedulers", self.exact_schedulers)
        flag("fp16_gradients", self.fp16_gradients)
        flag("one_pass", self.one_pass)
        checked_on_nonfinite(self.on_nonfinite)
        if self.rules is not None:
            object.__setattr__(self, "rules", rules_from(self.rules))

    @classmethod
    def from_arguments(cls, owner: str, given: Mapping[str, Any]) -> Self:
        """Check the arguments of a plugin.

        Args:
            owner: the plugin's class.
            given: the arguments by name, and whatever else; what they may be is said there.
        """
        precision = checked_training_precision(given["precision"])
        in_eval = given["eval_precision"]
        return cls(
            **{option.name: given[option.name] for option in fields(cls) if option.name in given}
            | {
                "precision": precision,
                "eval_precision": None if in_eval is None else checked_precision("eval_precision", in_eval),
                "weights": weights_meant(given["precision"], given["weights"]),
                "float8_config": (
                    checked_config(f"{owner}('fp8')", given["float8_config"]) if precision == "fp8" else None
                ),
                "loss_scale": _checked_loss_scale(given),
            }
        )

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


def _checked_loss_scale(given: Mapping[str, Any]) -> LossScaleOptions:
    """Return the options of a loss scale, each of the type of its default."""
    for option in fields(LossScaleOptions):
        if isinstance(option.default, bool):
            flag(option.name, given[option.name])
        elif not isinstance(option.default, str):
            number(option.name, given[option.name], none=option.default is None)
    return LossScaleOptions.among(given)


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
