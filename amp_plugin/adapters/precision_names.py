"""The names of precisions: ours, and what users of torch, Lightning, Accelerate and apex type instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

import torch

from amp_plugin.did_you_mean import did_you_mean

if TYPE_CHECKING:
    from amp_plugin.weights.formats import WeightsName

PrecisionName = Literal["fp16", "bf16", "fp32"]
TrainingPrecision = Literal["fp16", "bf16", "fp32", "fp8"]
StockName = Literal["16-mixed", "bf16-mixed", "32-true"]
NameWithWeights = Literal["16-true", "bf16-true"]
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# The dtype that autocast computes in, in training; of fp8 around the layers that torchao has converted.
TRAINING_DTYPES: Final = {**DTYPES, "fp8": torch.bfloat16}
STOCK_NAMES: Final = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true", "fp8": "bf16-mixed"}
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


def known_precision(given: object) -> PrecisionName | None:
    """Return our name of a precision, from a name of anybody's, a dtype, or 16 and 32; None if it is none.

    Example:
        >>> known_precision("16-mixed"), known_precision(torch.bfloat16), known_precision("fp8")
        ('fp16', 'bf16', None)
    """
    name = str(given).removeprefix("torch.")
    return cast("PrecisionName", name) if name in DTYPES else OTHER_NAMES.get(name)


def checked_precision(
    option: str, given: object, source: str = "", *, weights_in: str = "weights={!r}"
) -> PrecisionName:
    """Return our name of a precision, from a name of anybody's.

    Args:
        option: the option it was given for.
        given: a name, a torch.dtype, or 16 and 32.
        source: what set the option, for the error; left out where it is plain.
        weights_in: how the option that stores weights in 16 bits is written there.

    Raises:
        ValueError: it is no precision of ours; the text says what to use.
    """
    known = known_precision(given)
    if known is not None:
        return known
    place = f"{option}={given!r}{f' from {source}' if source else ''}"
    name = str(given).removeprefix("torch.")
    if name in WEIGHTS_IN_16_BITS:
        mine = WEIGHTS_IN_16_BITS[name]
        msg = (
            f"{place} keeps the weights themselves in 16 bits, which is not mixed precision: small updates "
            f"are lost. Use {option}={mine!r}: it computes in the same dtype and keeps the weights in fp32. "
            f"With {weights_in.format(f'{mine}-true')} too all of them stay in 16 bits, and are trained as exactly"
        )
    elif name in _DOUBLE:
        msg = (
            f"{place} is not mixed precision, nothing is cast in float64; allowed are {_allowed()}. For "
            "float64 leave amp_plugin out: use Lightning's own precision='64-true', or model.double()"
        )
    else:
        names = [*DTYPES, *OTHER_NAMES]
        hint = did_you_mean(name, names, written=lambda near: f"{option}={OTHER_NAMES.get(near, near)!r}")
        msg = f"{place} is unknown; allowed are {_allowed()}{hint}"
    raise ValueError(msg)


def checked_training_precision(given: object) -> TrainingPrecision:
    """Return our name of a precision to train in.

    Args:
        given: what :func:`checked_precision` takes, ``"fp8"``, or a name that tells of weights too.

    Raises:
        ValueError: it is no precision of ours; the text says what to use.
    """
    if str(given) in {"fp8", "transformer-engine", "float8"}:
        return "fp8"
    return checked_precision("precision", WEIGHTS_IN_16_BITS.get(str(given), given))


def weights_meant(precision: object, weights: WeightsName) -> WeightsName:
    """Return how weights are stored: as the option says, or as the name of the precision implies.

    Args:
        precision: as given: Lightning's ``"bf16-true"`` and ``"16-true"`` keep all weights in 16 bits.
        weights: as given; ``"fp32"``, the default, leaves it to the precision.

    Example:
        >>> weights_meant("bf16-true", "fp32"), weights_meant("bf16-true", "bf16-stochastic")
        ('bf16-true', 'bf16-stochastic')
        >>> weights_meant("bf16-mixed", "fp32")
        'fp32'
    """
    name = WEIGHTS_IN_16_BITS.get(str(precision))
    return cast("WeightsName", f"{name}-true") if name is not None and weights == "fp32" else weights


def _allowed() -> str:
    return ", ".join(map(repr, DTYPES))
