"""What store_weights does not take, and what to do instead."""

from __future__ import annotations

from typing import Any, get_args

from torch import nn

from amp_plugin.did_you_mean import did_you_mean
from amp_plugin.precision import WeightsName

_NAMES = get_args(WeightsName)
_ALIASES = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf16-true", "bf16_true"), "bf16"),
    **dict.fromkeys(("float16", "half", "torch.float16", "16-true", "fp16-true"), "fp16"),
    **dict.fromkeys(("float32", "float", "torch.float32", "32-true", "no"), "fp32"),
    **dict.fromkeys(("stochastic", "bf16_stochastic", "stochastic-bf16"), "bf16-stochastic"),
}


def checked_name(given: Any) -> WeightsName:
    """Return how weights are to be stored.

    Raises:
        ValueError: It is none of the ways.
    """
    if given in _NAMES:
        return given  # type: ignore[no-any-return]
    hint = did_you_mean(str(given), _NAMES, aliases=_ALIASES, written=lambda near: f"weights={near!r}")
    msg = f"weights={given!r} is unknown; allowed are {', '.join(map(repr, _NAMES))}{hint}"
    raise ValueError(msg)


def refuse_other_precision(weights: str, precision: str, *, named: str = "precision") -> None:
    """Raise if a model would compute in another dtype than its weights are stored in.

    Args:
        weights: How weights are stored.
        precision: ``"fp16"``, ``"bf16"``, or another word for no mixed precision.
        named: The option that gives it.

    Raises:
        ValueError: It would.
    """
    if weights == "fp32" or weights.partition("-")[0] == precision:
        return
    wanted = weights.partition("-")[0]
    fits = f" or weights={precision!r}" if precision in _NAMES and precision != "fp32" else ""
    msg = (
        f"weights={weights!r} needs {named}={wanted!r}, not {precision!r}: the model computes with its "
        f"weights as they are stored. Use {named}={wanted!r}, weights='fp32'{fits}"
    )
    raise ValueError(msg)


def refuse_sharded(model: nn.Module, weights: str) -> None:
    """Raise if a model's parameters are shards: FSDP stores float32 ones and casts them by itself.

    Raises:
        TypeError: They are.
    """
    setting = sharded_by(model)
    if setting is not None:
        refuse_sharded_weights(weights, setting)


def refuse_sharded_weights(weights: str, setting: str = "DtypePlan(compute='bf16')") -> None:
    """Raise if the weights of a model that is, or will be, sharded are to be stored in 16 bits.

    Args:
        weights: How they are to be stored.
        setting: What makes the engine gather them in 16 bits.

    Raises:
        TypeError: They are.
    """
    if weights != "fp32":
        msg = (
            f"weights={weights!r} does not work on a sharded model: it stores shards in float32 and gathers "
            f"them in 16 bits by itself; leave weights='fp32' and use {setting}"
        )
        raise TypeError(msg)


def sharded_by(model: nn.Module) -> str | None:
    """Return by which setting an engine that shards a model casts its weights; None if it is whole."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    has_shards = any(type(param).__name__ == "DTensor" for param in model.parameters())
    if has_shards or "FSDPModule" in kinds:
        return "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
    if "FullyShardedDataParallel" in kinds:
        return "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))"
    if "DeepSpeedEngine" in kinds:
        return 'DeepSpeed\'s config {"bf16": {"enabled": true}}'
    return None
