"""The names of dtypes and precisions, ours and those of other libraries, and which a device computes fast."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import torch

from amp_plugin.messages import did_you_mean, warn_user

PrecisionName = Literal["fp16", "bf16", "fp32"]
TrainingPrecision = Literal["fp16", "bf16", "fp32", "fp8"]
StockName = Literal["16-mixed", "bf16-mixed", "32-true"]
NameWithWeights = Literal["16-true", "bf16-true"]
WeightsName = Literal["fp32", "bf16", "fp16", "bf16-stochastic", "bf16-true", "fp16-true"]
StateName = Literal["fp32", "bf16", "8bit"]
ReduceName = Literal["fp32", "bf16"]
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SHORT: Final = {**{dtype: name for name, dtype in DTYPES.items()}, torch.float64: "fp64"}
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
_WEIGHTS: Final = get_args(WeightsName)
_STORED_AS: Final = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("float32", "float", "torch.float32", "32-true", "no"), "fp32"),
    **dict.fromkeys(("stochastic", "bf16_stochastic", "stochastic-bf16"), "bf16-stochastic"),
    **dict.fromkeys(("bf16_true",), "bf16-true"),
    **dict.fromkeys(("16-true", "fp16_true"), "fp16-true"),
}
_DOUBLE: Final = ("64", "64-true", "float64", "double", "fp64")


def short_name(dtype: torch.dtype) -> str:
    """Return ``"bf16"`` for ``torch.bfloat16``, and torch's own name where there is no shorter one."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


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
    """Return our name of a precision, from a name of anybody's."""
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
            f"With {weights_in.format(f'{mine}-true')} they all stay in 16 bits, and are trained as exactly"
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
    """Return our name of a precision to train in."""
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


def checked_dtype(option: str, given: Any, allowed: Sequence[str] = get_args(PrecisionName)) -> Any:
    """Return the name of a dtype, also of a torch.dtype."""
    name = known_precision(given) if isinstance(given, torch.dtype) else given
    if name in allowed:
        return name
    known = known_precision(given)
    near = [*allowed] if known is None else [name for name in allowed if name == known]
    given_as = {str(given): name for name in near[: known is not None]}
    hint = did_you_mean(given, near, aliases=given_as, written=lambda name: f"{option}={name!r}")
    msg = f"{option}={given!r} is not allowed; give {' or '.join(map(repr, allowed))}{hint}"
    raise ValueError(msg)


def checked_reduce(given: Any) -> ReduceName:
    """Return the dtype that gradients are to be reduced in."""
    return checked_dtype("reduce", given, get_args(ReduceName))  # type: ignore[no-any-return]


def checked_state(given: Any) -> StateName:
    """Return how optimizers' moments are to be kept, or raise ValueError."""
    return _checked_word("state", given, get_args(StateName), {})  # type: ignore[no-any-return]


def checked_weights(given: Any) -> WeightsName:
    """Return how weights are to be stored, or raise ValueError."""
    return _checked_word("weights", given, _WEIGHTS, _STORED_AS)  # type: ignore[no-any-return]


def _checked_word(option: str, given: Any, words: Sequence[str], aliases: Mapping[str, str]) -> Any:
    if given in words:
        return given
    hint = did_you_mean(str(given), words, aliases=aliases, written=lambda near: f"{option}={near!r}")
    msg = f"{option}={given!r} is unknown; allowed are {', '.join(map(repr, words))}{hint}"
    raise ValueError(msg)


def _allowed() -> str:
    return ", ".join(map(repr, DTYPES))


def refuse_other_precision(weights: str, precision: str, *, named: str = "precision") -> None:
    """Raise if a model would compute in another dtype than its weights are stored in."""
    wanted = weights.partition("-")[0]
    if weights == "fp32" or wanted == precision:
        return
    fits = f" or weights={precision!r}" if precision in _WEIGHTS and precision != "fp32" else ""
    msg = (
        f"weights={weights!r} needs {named}={wanted!r}, not {precision!r}: the model computes with its "
        f"weights as they are stored. Use {named}={wanted!r}, weights='fp32'{fits}"
    )
    raise ValueError(msg)


def stores_all(weights: str) -> bool:
    """Whether all weights are stored, not only what autocast would cast, and activations are in 16 bits."""
    return weights.endswith("-true")


# -- speed ---------------------------------------------------------------------------------------

# Names of instruction sets in /proc/cpuinfo, of x86-64 and of Arm.
_BF16_ARITHMETIC: Final = {"avx512_bf16", "amx_bf16", "bf16"}
_FP16_ARITHMETIC: Final = {"avx512_fp16", "amx_fp16", "asimdhp"}


def processor_facts() -> tuple[str, set[str]]:
    """Return the processor's name and its instruction sets; none where /proc/cpuinfo lists none."""
    name, flags = platform.processor() or platform.machine(), set()
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
    return name, flags


def is_fast(precision: str, device_type: str, index: int = 0) -> bool | None:
    """Return whether a device has arithmetic of a precision; None if that is not known."""
    if device_type == "cpu":
        flags = processor_facts()[1]
        return (
            bool(flags & (_FP16_ARITHMETIC if precision == "fp16" else _BF16_ARITHMETIC)) if flags else None
        )
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(index).major >= (7 if precision == "fp16" else 8)
    return None


def speed_advice(precision: str, device_type: str) -> str:
    """Return what to know of a precision's speed on a device; empty if it is fast, or nothing is known."""
    if precision not in {"fp16", "bf16"} or is_fast(precision, device_type) is not False:
        return ""
    other = "bf16" if precision == "fp16" else "fp16"
    better = f"; {other} is" if is_fast(other, device_type) else ", expect no speed-up"
    return f"{precision} is not fast on this {device_type}{better}"


def warn_of_slow_fp16(precision: str, device_type: str) -> None:
    """Warn at the start of a run whose device has no fp16 arithmetic, as ``amp-plugin doctor`` does."""
    advice = speed_advice(precision, device_type) if precision == "fp16" else ""
    if advice:
        warn_user(f"{advice}. The numbers are right all the same; amp-plugin doctor shows what is fast here")
