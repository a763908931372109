"""Translates and checks the names of dtypes and precisions, including those of other libraries."""

from __future__ import annotations

from typing import Any, Final, Literal, cast, get_args

import torch

from amp_plugin.messages import OptionError, did_you_mean

PrecisionName = Literal["fp16", "bf16", "fp32"]
TrainingPrecision = Literal["fp16", "bf16", "fp32", "fp8", "fp8-rowwise", "mxfp8", "nvfp4", "auto"]
StockName = Literal["16-mixed", "bf16-mixed", "32-true"]
NameWithWeights = Literal["16-true", "bf16-true"]
WeightsName = Literal["fp32", "bf16", "fp16", "bf16-stochastic", "bf16-true", "fp16-true"]
StateName = Literal["fp32", "bf16", "8bit"]
ReduceName = Literal["fp32", "bf16"]
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SHORT: Final = {**{dtype: name for name, dtype in DTYPES.items()}, torch.float64: "fp64"}
BELOW_16_BITS: Final = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")
# Maps each precision to the dtype of autocast in training.
# With a precision below 16 bits, ops outside converted layers run under autocast in bfloat16.
TRAINING_DTYPES: Final = {**DTYPES, **dict.fromkeys(BELOW_16_BITS, torch.bfloat16)}
STOCK_NAMES: Final = {
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp32": "32-true",
    **dict.fromkeys(BELOW_16_BITS, "bf16-mixed"),
}
OTHER_NAMES: Final[dict[str, PrecisionName]] = {
    "16": "fp16",
    "16-mixed": "fp16",
    "fp16-mixed": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "float": "fp32",
    "float32": "fp32",
}
WEIGHTS_IN_16_BITS: Final[dict[str, Literal["fp16", "bf16"]]] = {
    "16-true": "fp16",
    "fp16-true": "fp16",
    "bf16-true": "bf16",
    "O3": "fp16",
}
_DOUBLE: Final = ("64", "64-true", "float64", "double", "fp64")


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name, such as ``"bf16"``. Dtypes without a short name keep torch's name."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def known_precision(given: object) -> PrecisionName | None:
    """Return amp_plugin's name for a precision, or None if the name, dtype or number is unknown."""
    name = str(given).removeprefix("torch.")
    return cast("PrecisionName", name) if name in DTYPES else OTHER_NAMES.get(name)


def checked_precision(
    option: str, given: object, *, words: Any = DTYPES, weights_in: str = "weights={!r}"
) -> PrecisionName:
    """Return amp_plugin's name for a precision. Raise OptionError if the precision is not allowed."""
    known = known_precision(given)
    if known is not None:
        return known
    place, name, allowed = (
        f"{option}={given!r}",
        str(given).removeprefix("torch."),
        ", ".join(map(repr, words)),
    )
    if name in WEIGHTS_IN_16_BITS:
        mine = WEIGHTS_IN_16_BITS[name]
        msg = (
            f"{place} keeps the weights themselves in 16 bits, which is not mixed precision: small updates "
            f"are lost. Use {option}={mine!r}: it computes in the same dtype and keeps the weights in fp32. "
            f"With {weights_in.format(f'{mine}-true')} they all stay in 16 bits, and are trained as exactly"
        )
    elif name in _DOUBLE:
        msg = (
            f"{place} is not mixed precision, because float64 casts nothing; allowed are {allowed}. For "
            "float64 do not use amp_plugin: use the framework's own precision='64-true', or "
            "model.double()"
        )
    else:
        names = [*words, *OTHER_NAMES]
        hint = did_you_mean(name, names, written=lambda near: f"{option}={OTHER_NAMES.get(near, near)!r}")
        msg = f"{place} is unknown; allowed are {allowed}{hint}"
    raise OptionError(option, given, allowed, msg)


def checked_training_precision(given: object) -> TrainingPrecision:
    """Return amp_plugin's name for a training precision. Raise OptionError if it is unknown."""
    if str(given) in {"fp8", "transformer-engine", "float8"}:
        return "fp8"
    if isinstance(given, str) and (given == "auto" or given in BELOW_16_BITS):
        return cast("TrainingPrecision", given)
    words = (*DTYPES, *BELOW_16_BITS, "auto")
    return checked_precision("precision", WEIGHTS_IN_16_BITS.get(str(given), given), words=words)


def weights_meant(precision: object, weights: WeightsName) -> WeightsName:
    """Return how weights are stored. A precision such as ``"bf16-true"`` overrides ``weights="fp32"``."""
    name = WEIGHTS_IN_16_BITS.get(str(precision))
    return cast("WeightsName", f"{name}-true") if name is not None and weights == "fp32" else weights


def checked_word(option: str, given: Any, words: Any) -> Any:
    """Return the allowed string that matches ``given`` (a string or dtype), or raise OptionError."""
    known, allowed = known_precision(given), get_args(words)
    name = known if isinstance(given, torch.dtype) else given
    if name in allowed:
        return name
    meant = {"16-true": "fp16-true"}.get(str(given), known)
    aliases = {str(given): str(meant)} if meant in allowed else {}
    hint = did_you_mean(given, allowed, aliases=aliases, written=lambda near: f"{option}={near!r}")
    raise OptionError(option, given, f"{' or '.join(map(repr, allowed))}{hint}")


def refuse_other_precision(weights: str, precision: str, *, named: str = "precision") -> None:
    """Raise OptionError if a model would not compute in the dtype of its stored weights."""
    wanted = weights.partition("-")[0]
    if weights == "fp32" or wanted == precision:
        return
    fits = f" or weights={precision!r}" if precision in get_args(WeightsName) and precision != "fp32" else ""
    msg = (
        f"weights={weights!r} needs {named}={wanted!r}, not {precision!r}: the model computes with its "
        f"weights as they are stored. Use {named}={wanted!r}, weights='fp32'{fits}"
    )
    allowed = f"'fp32'{fits}, or another {named}"
    raise OptionError(option="weights", value=weights, allowed=allowed, text=msg, others=(named,))


def stores_all(weights: str) -> bool:
    """Return whether a weight format stores all weights in 16 bits, not only those that autocast casts."""
    return weights.endswith("-true")
