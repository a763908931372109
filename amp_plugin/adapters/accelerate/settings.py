"""AmpKwargs: what a user may set, where each value comes from, and when AmpAccelerator computes itself.

One order of precedence; the first source that names an option decides it::

    AmpKwargs(...) in kwargs_handlers          the program
    GradScalerKwargs(...) in kwargs_handlers
    AMP_PLUGIN_<OPTION>                        the environment of the launch
    the YAML file named by AMP_PLUGIN_CONFIG
    the default
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradScalerKwargs, KwargsHandler, PrecisionType
from typing_extensions import Self

from amp_plugin.adapters.option_sources import OPTIONS, decided, naming, outside_program, read_all
from amp_plugin.adapters.settings import AdapterSettings
from amp_plugin.messages import warn_user
from amp_plugin.options import AccelerateOptions, lists_options, takes
from amp_plugin.precision import WEIGHTS_IN_16_BITS, checked_precision, known_precision

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
_LEFT = {
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


@lists_options(AccelerateOptions)
class AmpKwargs(KwargsHandler):
    """Options of AmpAccelerator, for ``kwargs_handlers``; None leaves an option to the next source.

    Each is also a variable of the environment (``AMP_PLUGIN_INIT_SCALE=1024``) and a key of the
    YAML file that ``AMP_PLUGIN_CONFIG`` names. Those of the loss scale are checked in any precision and have
    an effect in fp16 only. In text ``fp32_modules`` is ``"LayerNorm,head.*"``.

    Args:
        {options}

    Example:
        >>> AmpKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    @takes(AccelerateOptions, by_position=0, or_none=True)
    def __init__(self, **given: Any) -> None:
        self.__dict__.update({name: given.get(name) for name in OPTIONS})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AmpKwargs) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(map(str, vars(self).values())))

    def __repr__(self) -> str:
        return f"AmpKwargs({', '.join(f'{name}={value!r}' for name, value in self.to_kwargs().items())})"


def refuse_misplaced(owner: str, names: Iterable[str]) -> None:
    """Raise TypeError if an option of AmpKwargs is given to the accelerator itself."""
    option = next((name for name in names if name in OPTIONS), None)
    if option is not None:
        msg = (
            f"{owner}: {option!r} is an option of AmpKwargs: "
            f"write {owner}(kwargs_handlers=[AmpKwargs({option}=...)])"
        )
        raise TypeError(msg)


@dataclass(frozen=True, kw_only=True)
class Settings(AdapterSettings, AccelerateOptions):
    """The options in force.

    Attributes:
        sources: option -> what set it; options that nothing has set are absent.
        enabled: ``GradScalerKwargs(enabled=...)``.
    """

    sources: Mapping[str, str]
    enabled: bool
    named: ClassVar[str] = "mixed_precision"

    def in_precision(self, mixed_precision: str) -> Self:
        """Return the settings of an accelerator, whose weights must be stored in the dtype it computes in."""
        with naming(self.sources):
            return replace(self, precision="fp32" if mixed_precision == "no" else mixed_precision)

    @property
    def changes_forward(self) -> bool:
        """Whether prepared models compute in 16 bits, in training or in ``eval()`` mode."""
        return self.precision != "fp32" or self.eval_precision in {"fp16", "bf16"}


def resolve(handlers: Iterable[KwargsHandler], environment: Mapping[str, str]) -> Settings:
    """Decide each option by the order of precedence above; of several AmpKwargs the first that names it."""
    handlers = list(handlers)
    layers = [("AmpKwargs", given.to_kwargs()) for given in handlers if isinstance(given, AmpKwargs)]
    scaling = [given.to_kwargs() for given in handlers if isinstance(given, GradScalerKwargs)]
    enabled = all(given.pop("enabled", True) for given in scaling)
    layers += [("GradScalerKwargs", given) for given in scaling]
    given, sources = decided([*layers, *outside_program(environment)])
    with naming(sources):
        return Settings(**read_all(given), sources=sources, enabled=enabled)


def precision_for_accelerate(argument: Any, environment: Mapping[str, str]) -> Any:
    """Return ``mixed_precision`` in Accelerate's words; None leaves it to the environment.

    Accelerate checks the argument only, so a wrong word of the environment is refused here.
    """
    from_environment = argument is None and not AcceleratorState._shared_state
    given = environment.get(PRECISION_VARIABLE, "no").lower() if from_environment else argument
    if given is None or str(given) in PrecisionType.list():
        return argument
    known = known_precision(given)
    if known is not None:
        return "no" if known == "fp32" else known
    if str(given) in WEIGHTS_IN_16_BITS:
        source = PRECISION_VARIABLE if from_environment else ""
        checked_precision("mixed_precision", given, source, weights_in="AmpKwargs(weights={!r})")
    if from_environment:
        allowed = ", ".join(PrecisionType.list())
        msg = f"{PRECISION_VARIABLE}={given!r} in the environment is unknown; allowed are {allowed}"
        raise ValueError(msg)
    return argument


# -- who computes, and where ---------------------------------------------------------------------


def is_ours(
    distributed: DistributedType,
    precision: str,
    settings: Settings,
    *,
    explicit: bool,
    float8_recipe: Any = None,
) -> bool:
    """Return whether mixed precision is ours; refuse AmpKwargs (``explicit``) where it is another engine's.

    fp8 is ours where torchao has a recipe.
    """
    if distributed == DistributedType.DEEPSPEED:  # whose engine is told, and observed
        return False
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
    if precision != "no" or settings.sources:
        warn_user(f"{text}; amp_plugin's options have no effect")
    return False


def ranks_without_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started several processes on a machine without an accelerator.

    Accelerate would let each of them train alone, unless it is told ``cpu=True``.
    """
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in environment
    return several and not torch.accelerator.is_available()
