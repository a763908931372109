"""What store_weights does not take, and what to do instead."""

from __future__ import annotations

from typing import Any, get_args

from torch import nn
from torch.distributed.tensor import DTensor

from amp_plugin.did_you_mean import did_you_mean
from amp_plugin.weights.forms import WeightsName

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


def refuse_sharded(model: nn.Module, weights: str) -> None:
    """Raise if a model's parameters are shards: FSDP stores float32 ones and casts them by itself.

    Raises:
        TypeError: They are.
    """
    if weights == "fp32":
        return
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if any(isinstance(param, DTensor) for param in model.parameters()) or "FSDPModule" in kinds:
        setting = "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
    elif "FullyShardedDataParallel" in kinds:
        setting = "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))"
    elif "DeepSpeedEngine" in kinds:
        setting = 'DeepSpeed\'s config {"bf16": {"enabled": true}}'
    else:
        return
    msg = (
        f"weights={weights!r} does not work on a sharded model: it stores shards in float32 and gathers them "
        f"in 16 bits by itself; leave weights='fp32' and use {setting}"
    )
    raise TypeError(msg)
