"""When AmpAccelerator takes mixed precision over, and what it is set up with then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, DistributedType, FullyShardedDataParallelPlugin, PrecisionType

from amp_plugin.adapters.accelerate.forward import RegionOptions
from amp_plugin.adapters.accelerate.settings import Settings
from amp_plugin.adapters.model_weights import ModelWeights
from amp_plugin.casting.dispatcher import set_default_rules
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_files import TABLES
from amp_plugin.precision import (
    TRAINING_DTYPES,
    WEIGHTS_IN_16_BITS,
    checked_precision,
    known_precision,
    refuse_other_precision,
)
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.user_warnings import warn_user

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LEFT = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def precision_for_accelerate(argument: Any, environment: Mapping[str, str]) -> Any:
    """Return ``mixed_precision`` in Accelerate's words; None leaves it to the environment.

    Args:
        argument: the program's ``mixed_precision``; other names of precisions are understood.
        environment: where ``ACCELERATE_MIXED_PRECISION`` may name one; Accelerate checks the argument only.

    Raises:
        ValueError: the environment names none of Accelerate's; or either keeps weights in 16 bits.
    """
    from_environment = argument is None and not AcceleratorState._shared_state
    given = environment.get(_VARIABLE, "no").lower() if from_environment else argument
    if given is None or str(given) in PrecisionType.list():
        return argument
    known = known_precision(given)
    if known is not None:
        return "no" if known == "fp32" else known
    if str(given) in WEIGHTS_IN_16_BITS:
        source = _VARIABLE if from_environment else ""
        checked_precision("mixed_precision", given, source, weights_in="AmpKwargs(weights={!r})")
    if from_environment:
        allowed = ", ".join(PrecisionType.list())
        msg = f"{_VARIABLE}={given!r} in the environment is unknown; allowed are {allowed}"
        raise ValueError(msg)
    return argument


def ranks_without_gpu(environment: Mapping[str, str]) -> bool:
    """Say whether a launcher has started several processes where there is no accelerator.

    Accelerate would let each of them train alone, unless it is told ``cpu=True``.
    """
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in environment
    return several and not torch.accelerator.is_available()


def warn_of_missing_processes(running: int, environment: Mapping[str, str]) -> None:
    """Warn where ``accelerate launch`` was asked for several processes and has started one.

    Its MULTI_CPU, what ``accelerate config`` writes for a CPU, starts several by mpirun only. Without, it
    leaves an address to meet at, but neither a rank nor a number of processes.

    Args:
        running: processes of this run.
        environment: the launch's.
    """
    launched_alone = {"MASTER_ADDR", _VARIABLE, "ACCELERATE_USE_CPU"} <= {*environment} and not (
        {"WORLD_SIZE", "RANK", "LOCAL_RANK"} & {*environment}
    )
    if running == 1 and launched_alone:
        warn_user(
            "accelerate launch was asked for several processes (num_processes) and has started one: its "
            "MULTI_CPU needs mpirun. For several processes on a CPU write distributed_type: MULTI_GPU, "
            'gpu_ids: "-1,-1" and use_cpu: true; configs/accelerate/cpu_bf16_2_processes.yaml is such a file'
        )


def is_ours(
    distributed: DistributedType,
    precision: str,
    settings: Settings,
    *,
    explicit: bool,
    float8_recipe: Any = None,
) -> bool:
    """Say whether mixed precision is ours, or another engine's.

    Args:
        distributed: the accelerator's ``distributed_type``.
        precision: its ``mixed_precision``.
        settings: the options.
        explicit: whether the program asked for options by AmpKwargs.
        float8_recipe: Accelerate's recipe for torchao; the other engines of fp8 do their own clipping.

    Raises:
        ValueError: it did, and they would have no effect.
    """
    other = _LEFT.get(distributed, "fp8 training" if precision == "fp8" and float8_recipe is None else None)
    if other is None:
        return True
    text = (
        f"{other} casts and scales losses by itself: AmpAccelerator leaves mixed precision, clipping and "
        f"steps to Accelerate's own code for it"
    )
    if explicit:
        msg = f"{text}, so AmpKwargs would have no effect; remove AmpKwargs from kwargs_handlers"
        raise ValueError(msg)
    if precision != "no" or settings.values:
        warn_user(f"{text}; amp_plugin's options have no effect")
    return False


def grad_scaler(
    device: str, precision: str, settings: Settings, fsdp1: FullyShardedDataParallelPlugin | None
) -> GradScaler:
    """Return the scaler of a run; outside fp16 it scales nothing, its options are checked all the same.

    Args:
        device: type of the accelerator's device.
        precision: its ``mixed_precision``.
        settings: the options.
        fsdp1: the plugin of FSDP1, whose ranks decide together; DDP's and DTensors' do so by themselves.

    Raises:
        ValueError: an option has a bad value; the text names its source.
    """
    adapter, enabled = settings.adapter(), settings.enabled and precision == "fp16"
    return GradScaler.from_options(
        device,
        settings.loss_scale(),
        enabled=enabled,
        fp16_gradients=adapter.fp16_gradients,
        one_pass=adapter.one_pass,
        on_nonfinite=adapter.on_nonfinite,
        **(_groups(fsdp1) if fsdp1 is not None and (enabled or adapter.on_nonfinite != "ignore") else {}),
    )


def _groups(fsdp1: FullyShardedDataParallelPlugin) -> dict[str, list[ProcessGroup | None]]:
    strategy = fsdp1.sharding_strategy or fsdp1.reshard_after_forward
    sharded = getattr(strategy, "name", "") in {"FULL_SHARD", "SHARD_GRAD_OP"}
    return {"sharded_groups" if sharded else "process_groups": [torch.distributed.group.WORLD]}


def model_weights(precision: str, settings: Settings, distributed: DistributedType) -> ModelWeights:
    """Return how the weights of prepared models are stored.

    Raises:
        ValueError: the models would compute in another dtype; the text names what set the option.
        TypeError: FSDP shards them and stores float32 by itself.
    """
    weights = settings.adapter().weights
    settings.build(lambda: refuse_other_precision(weights, precision, named="mixed_precision"))
    in_eval = settings.adapter().eval_precision
    if in_eval is not None:
        settings.build(lambda: refuse_other_precision(weights, in_eval, named="eval_precision"))
    if weights != "fp32" and distributed == DistributedType.FSDP:
        msg = (
            f"weights={weights!r} does not work under FSDP: it stores shards in float32 and gathers them in "
            "16 bits by itself; leave weights='fp32' and use "
            "FullyShardedDataParallelPlugin(mixed_precision_policy=...)"
        )
        raise TypeError(msg)
    return ModelWeights(weights, casts=precision != "no")


def region_options(
    device: str, precision: str, settings: Settings, handler: AutocastKwargs | None
) -> RegionOptions:
    """Return how prepared models compute.

    Args:
        device: type of the accelerator's device.
        precision: its ``mixed_precision``, or the precision of its models in ``eval()`` mode.
        settings: the options.
        handler: its ``autocast_handler``.
    """
    handler = handler or AutocastKwargs()
    mixed = precision in {"fp16", "bf16", "fp8"}
    return RegionOptions(
        device_type=device,
        dtype=TRAINING_DTYPES[precision] if mixed else torch.bfloat16,
        enabled=handler.enabled and mixed,
        cache_enabled=handler.cache_enabled,
        fp32_outputs=settings.adapter().fp32_outputs,
    )


def rules_of_blocks(device: str, settings: Settings) -> None:
    """Let ``torch.autocast`` blocks of the process follow our rules.

    Raises:
        ValueError: the rules are refused; the text names what set them.
    """
    rules = settings.adapter().rules
    if rules is None and device in TABLES:
        rules = OpRules.default(device)
    if rules is not None:
        settings.build(lambda: set_default_rules(rules))
