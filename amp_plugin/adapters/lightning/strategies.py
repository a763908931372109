"""Which strategies AmpPrecision works under, and what it needs to know of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

_REFUSED = {
    "DeepSpeedStrategy": (
        "DeepSpeed scales losses, clips and steps by itself and would never ask this plugin; "
        "delete the plugin and use precision='16-mixed' or 'bf16-mixed', or use strategy='fsdp'"
    ),
    "XLAStrategy": (
        "XLA devices compute in bfloat16 by torch_xla's own switch, without autocast; "
        "delete the plugin and use precision='bf16-true'"
    ),
}
_REFUSED["SingleDeviceXLAStrategy"] = _REFUSED["XLAFSDPStrategy"] = _REFUSED["XLAStrategy"]


def refuse_unsupported(strategy: object) -> None:
    """Raise if a strategy does mixed precision in a way of its own.

    Raises:
        TypeError: the strategy is DeepSpeed's or XLA's.
    """
    for kind in type(strategy).__mro__:
        if kind.__name__ in _REFUSED:
            msg = f"AmpPrecision does not work under {type(strategy).__name__}: {_REFUSED[kind.__name__]}"
            raise TypeError(msg)


def refuse_engine(model: nn.Module | None) -> None:
    """Raise if Fabric runs a model through DeepSpeed's engine.

    Raises:
        TypeError: the model is a DeepSpeedEngine.
    """
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        msg = f"FabricAmpPrecision does not work under DeepSpeedStrategy: {_REFUSED['DeepSpeedStrategy']}"
        raise TypeError(msg)


_SHARDED = {
    "FSDPStrategy": "strategy=FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
    "ModelParallelStrategy": "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
}


def refuse_sharded_strategy(strategy: object, weights: str) -> None:
    """Raise if weights are to be stored in 16 bits under a strategy that stores float32 shards by itself.

    Raises:
        TypeError: They are.
    """
    for kind in type(strategy).__mro__:
        if weights != "fp32" and kind.__name__ in _SHARDED:
            msg = (
                f"weights={weights!r} does not work under {type(strategy).__name__}: it stores shards in "
                "float32 and gathers them in 16 bits by itself; leave weights='fp32' and use "
                f"{_SHARDED[kind.__name__]}"
            )
            raise TypeError(msg)


def fsdp_root(model: nn.Module) -> FullyShardedDataParallel | None:
    """Return the model if FSDP's first version has wrapped it, else None."""
    return model if isinstance(model, FullyShardedDataParallel) else None


def scaler_options(root: FullyShardedDataParallel | None) -> dict[str, Any]:
    """Return GradScaler options for a strategy: under FSDP's first version ranks step together.

    They hold parts of each gradient, or with ``NO_SHARD`` the whole of it.
    """
    if root is None or root.process_group is None:
        return {}
    group, whole = (root.process_group,), root.sharding_strategy is ShardingStrategy.NO_SHARD
    return {"process_groups": group if whole else (), "sharded_groups": () if whole else group}
