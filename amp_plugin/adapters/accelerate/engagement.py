"""When AmpAccelerator takes mixed precision over, and what it sets up then."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, PrecisionType

from amp_plugin.adapters.accelerate.settings import Settings
from amp_plugin.casting.cast_cache import CastCache
from amp_plugin.casting.rule_sets import set_default_rules
from amp_plugin.casting.rules import TABLES, OpRules
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    from amp_plugin.adapters.accelerate.accelerator import AmpAccelerator

_LEFT = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def check_precision(argument: Any, environment: Mapping[str, str]) -> None:
    """Check the precision the environment names; Accelerate checks the argument only.

    Raises:
        ValueError: it is none of Accelerate's.
    """
    named = environment.get(_VARIABLE, "no").lower()
    if argument is None and not AcceleratorState._shared_state and named not in PrecisionType.list():
        allowed = ", ".join(PrecisionType.list())
        msg = f"{_VARIABLE}={named!r} in the environment is unknown; allowed are {allowed}"
        raise ValueError(msg)


def ranks_without_gpu(environment: Mapping[str, str]) -> bool:
    """Say whether a launcher has started several processes where there is no accelerator.

    Accelerate would let each of them train alone, unless it is told ``cpu=True``.
    """
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in environment
    return several and not torch.accelerator.is_available()


def is_ours(accelerator: AmpAccelerator, settings: Settings, *, explicit: bool) -> bool:
    """Say whether mixed precision is ours, or another engine's.

    Args:
        accelerator: with Accelerate's part set up.
        settings: the options.
        explicit: whether the program asked for options by AmpKwargs.

    Raises:
        ValueError: it did, and they would have no effect.
    """
    other = _LEFT.get(accelerator.distributed_type)
    if other is None and accelerator.mixed_precision == "fp8":
        other = "fp8 training"
    if other is None:
        return True
    text = (
        f"{other} casts and scales losses by itself: AmpAccelerator leaves mixed precision, clipping and "
        f"steps to Accelerate's own code for it"
    )
    if explicit:
        msg = f"{text}, so AmpKwargs would have no effect; remove AmpKwargs from kwargs_handlers"
        raise ValueError(msg)
    if accelerator.mixed_precision != "no" or settings.values:
        warnings.warn(f"{text}; amp_plugin's options have no effect", UserWarning, stacklevel=4)
    return False


def engage(accelerator: AmpAccelerator, settings: Settings) -> None:
    """Replace Accelerate's scaler by ours and let autocast blocks follow our rules."""
    precision, device = accelerator.mixed_precision, accelerator.device.type
    accelerator.native_amp = precision != "no"
    accelerator.scaler = None
    given = settings.of_scaler()
    checked = {**given, "enabled": False}
    settings.build(lambda: GradScaler("cpu", **checked))  # wrong numbers are errors in any precision
    if precision == "fp16":
        options = {**given, **_groups(accelerator)}
        accelerator.scaler = settings.build(lambda: GradScaler(device, **options))
    if not accelerator.native_amp:
        return
    rules = settings.get("rules")
    if rules is not None or device in TABLES:
        rules = OpRules.default(device) if rules is None else rules
        settings.build(lambda: set_default_rules(rules))
    if accelerator.is_fsdp2 and settings.get("fp32_outputs", True):
        _return_fp32_from_fsdp2(accelerator)


def _groups(accelerator: AmpAccelerator) -> dict[str, Any]:
    """Which ranks decide together; DDP's and DTensors' gradients need no telling."""
    if accelerator.distributed_type != DistributedType.FSDP or accelerator.is_fsdp2:
        return {}
    plugin = accelerator.state.fsdp_plugin
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    sharded = getattr(strategy, "name", "") in {"FULL_SHARD", "SHARD_GRAD_OP"}
    world = torch.distributed.group.WORLD
    return {"sharded_groups" if sharded else "process_groups": [world]}


def _return_fp32_from_fsdp2(accelerator: AmpAccelerator) -> None:
    """Undo the half-precision output dtype that Accelerate gives its own FSDP2 policy.

    A policy the user chose differs from Accelerate's and is left alone.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 -- only FSDP2 users pay for it

    plugin = accelerator.state.fsdp_plugin
    dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
    if plugin.mixed_precision_policy == MixedPrecisionPolicy(dtype, dtype, dtype):
        plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, dtype)


def window_cache(accelerator: AmpAccelerator, settings: Settings) -> CastCache | None:
    """Return the accelerator's cache of cast weights, or None where it would not help.

    Raises:
        RuntimeError: it was asked for and there is no native core.
    """
    wanted = settings.get("cast_cache")
    if wanted is None:
        core = native_core()
        loaded = core.loaded and core.region is not None
        wanted = (
            loaded
            and settings.cache_enabled is not False
            and accelerator.gradient_accumulation_steps > 1
            and accelerator.distributed_type != DistributedType.FSDP
        )
    if not wanted:
        return None
    if accelerator._cast_cache is None:
        accelerator._cast_cache = CastCache()
    return accelerator._cast_cache
