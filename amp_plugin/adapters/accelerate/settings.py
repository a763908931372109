"""AmpKwargs holds the options for Accelerate, and ``resolve`` finds the source of each option.

Each option comes from the first of these sources that sets it:

1. AmpKwargs in ``kwargs_handlers``, set by the program.
2. GradScalerKwargs in ``kwargs_handlers``, set by the program.
3. The environment variable ``AMP_PLUGIN_<OPTION>`` at launch.
4. The YAML file that the environment variable ``AMP_PLUGIN_CONFIG`` names.
5. The default of the option.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    GradScalerKwargs,
    KwargsHandler,
    PrecisionType,
    str_to_bool,
)

from amp_plugin.adapters.option_sources import OPTIONS, read_all, resolved
from amp_plugin.hardware import auto_precision, default_device
from amp_plugin.messages import naming
from amp_plugin.options import AccelerateOptions, lists_options, takes
from amp_plugin.precision import (
    BELOW_16_BITS,
    NameWithWeights,
    StockName,
    TrainingPrecision,
    checked_precision,
)

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


@lists_options(AccelerateOptions)
class AmpKwargs(KwargsHandler, SimpleNamespace):
    """The options of AmpAccelerator, to pass in ``kwargs_handlers``. An option that is None is not set.

    Each option can also be set by an environment variable, such as ``AMP_PLUGIN_INIT_SCALE=1024``, or in the
    YAML file that ``AMP_PLUGIN_CONFIG`` names. Loss-scale options are checked in every precision, but only
    take effect in fp16. In an environment variable, write the list ``fp32_modules`` as
    ``"LayerNorm,head.*"``.

    Args:
        {options}

    Example:
        >>> AmpKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    @takes(AccelerateOptions, by_position=0, or_none=True)
    def __init__(self, **given: Any) -> None:
        SimpleNamespace.__init__(self, **{name: given.get(name) for name in OPTIONS})

    def __repr__(self) -> str:
        return f"AmpKwargs({', '.join(f'{name}={value!r}' for name, value in self.to_kwargs().items())})"


def accelerators_arguments(
    self: Any,
    device_placement: bool = True,
    split_batches: bool = False,
    mixed_precision: TrainingPrecision | StockName | NameWithWeights | Literal["no"] | None = None,
    gradient_accumulation_steps: int = 1,
    cpu: bool = False,
    dataloader_config: Any = None,
    deepspeed_plugin: Any = None,
    fsdp_plugin: Any = None,
    torch_tp_plugin: Any = None,
    megatron_lm_plugin: Any = None,
    rng_types: list[Any] | None = None,
    log_with: Any = None,
    project_dir: str | os.PathLike[str] | None = None,
    project_config: Any = None,
    gradient_accumulation_plugin: Any = None,
    step_scheduler_with_optimizer: bool = True,
    kwargs_handlers: Sequence[Any] | None = None,
    dynamo_backend: Any = None,
    dynamo_plugin: Any = None,
    deepspeed_plugins: Any = None,
    parallelism_config: Any = None,
) -> None:
    """Declare the arguments of Accelerator for type checkers, because Accelerate has no ``py.typed`` file."""


def refuse_misplaced(owner: str, names: Iterable[str]) -> None:
    """Raise TypeError if an AmpKwargs option is passed to the accelerator itself."""
    for option in set(names) & set(OPTIONS):
        remedy = f"write {owner}(kwargs_handlers=[AmpKwargs({option}=...)])"
        msg = f"{owner}: {option!r} is an option of AmpKwargs: {remedy}"
        raise TypeError(msg)


def refuse_other_engine(
    kind: DistributedType, precision: str, float8_recipe: Any, sources: Mapping[str, str]
) -> bool:
    """Return whether Megatron-LM, XLA or an fp8 library handles mixed precision instead of amp_plugin.

    Raises:
        ValueError: the other library handles mixed precision, but the precision or an option such as
            ``weights`` requires amp_plugin.
    """
    engine = {DistributedType.MEGATRON_LM: "Megatron-LM", DistributedType.XLA: "XLA"}.get(kind)
    if engine is None and precision == "fp8" and float8_recipe is None:
        engine = "fp8 training by TransformerEngine or MS-AMP"
    asked = sorted(
        sources.keys() & {"eval_precision", "weights", "state", "on_nonfinite", "on_spike", "report"}
    )
    if engine is None or (precision == "no" and not asked):
        return engine is not None
    left_out = f", leave out {', '.join(asked)}" * bool(asked)
    ours = "; or AORecipeKwargs() in kwargs_handlers: torchao's fp8" * (precision == "fp8")
    msg = (
        f"{engine} casts and scales losses by itself, which AmpAccelerator cannot do for it: use "
        f"accelerate.Accelerator{left_out}, and start it without amp-plugin run or install(){ours}"
    )
    raise ValueError(msg)


def resolve(
    handlers: Sequence[KwargsHandler], environment: Mapping[str, str]
) -> tuple[AccelerateOptions, dict[str, str], bool]:
    """Take each option from the first source that sets it. The first of several AmpKwargs wins.

    Returns:
        Three values: the options; a dict that maps each option to its source; whether GradScalerKwargs leave
        loss scaling on.
    """
    layers = [
        ("AmpKwargs", read_all(given.to_kwargs())) for given in handlers if isinstance(given, AmpKwargs)
    ]
    scaling = [given.to_kwargs() for given in handlers if isinstance(given, GradScalerKwargs)]
    enabled = all(given.pop("enabled", True) for given in scaling)
    layers += [("GradScalerKwargs", given) for given in scaling]
    return *resolved(AccelerateOptions, layers, environment), enabled


def take_options(
    given: dict[str, Any], environment: Mapping[str, str]
) -> tuple[AccelerateOptions, dict[str, str], bool]:
    """Return the result of :func:`resolve`, and modify the dict ``given`` in place.

    Afterwards, Accelerator accepts the entries of ``given`` as its keyword arguments.
    """
    handlers = list(given.get("kwargs_handlers") or ())
    given["kwargs_handlers"] = [other for other in handlers if not isinstance(other, AmpKwargs)]
    # Without a GPU, launched processes only form a process group if Accelerate is given cpu=True.
    launched = int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in environment
    given["cpu"] = given.get("cpu", False) or (launched and not torch.accelerator.is_available())
    uses_cpu = given["cpu"] or str_to_bool(environment.get("ACCELERATE_USE_CPU", "no"))
    device = "cpu" if uses_cpu else default_device()
    given["mixed_precision"] = _precision_for_accelerate(given.get("mixed_precision"), environment, device)
    return resolve(handlers, environment)


def format_asked(argument: Any, environment: Mapping[str, str]) -> str:
    """Return the format to which amp_plugin converts layers, or "". Accelerate itself does ``"fp8"``."""
    given = environment.get(PRECISION_VARIABLE, "no").lower() if argument is None else argument
    return given if given in BELOW_16_BITS and given != "fp8" else ""


def _precision_for_accelerate(argument: Any, environment: Mapping[str, str], device: str) -> Any:
    """Check ``mixed_precision``, and return Accelerate's name for it. If it is None, Accelerate decides."""
    from_environment = argument is None and not AcceleratorState._shared_state
    given = environment.get(PRECISION_VARIABLE, "no").lower() if from_environment else argument
    if given is None or str(given) in (words := PrecisionType.list()):
        return given  # already in Accelerate's words
    if given in BELOW_16_BITS:
        return "bf16"  # With a format below 16 bits, all ops outside the converted layers compute in bf16.
    if given == "auto":
        chosen = auto_precision(device).precision
        return "no" if chosen == "fp32" else chosen
    with naming({"mixed_precision": PRECISION_VARIABLE} if from_environment else {}):
        known = checked_precision("mixed_precision", given, words=words, weights_in="AmpKwargs(weights={!r})")
    return "no" if known == "fp32" else known
