"""The options of loss scales and precisions, each stated once: its type, default, check and meaning.

Everything else comes from these dataclasses: the constructors of GradScaler, AmpPrecision, FabricAmpPrecision
and AmpKwargs (:func:`takes`), their docstrings (:func:`lists_options`), the environment variables
``AMP_PLUGIN_<OPTION>``, the keys of YAML files, and the tables of the documentation (``docs/api_tables.py``).
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    SupportsFloat,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from typing_extensions import Doc, Self

from amp_plugin.messages import did_you_mean
from amp_plugin.precision import (
    NameWithWeights,
    PrecisionName,
    ReduceName,
    StateName,
    StockName,
    TrainingPrecision,
    WeightsName,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from amp_plugin.casting.rules import OpRules

P = ParamSpec("P")
Class = TypeVar("Class", bound=type)
HysteresisMode = Literal["apex", "megatron", "deepspeed"]
OnNonfinite = Literal["skip", "raise", "ignore"]
ReportPath = Annotated[
    str | Path | None,
    Doc("A page of the run, rewritten while it goes on: ``amp_plugin.report``. It waits for each step."),
]


@dataclass(frozen=True)
class LossScaleOptions:
    """The options of a loss scale; the first four can be given by position, as to torch's scaler.

    Raises:
        TypeError: A value is of another type.
        ValueError: A number is out of range, or a word unknown.
    """

    init_scale: Annotated[float, Doc("First loss scale.")] = 2.0**16
    growth_factor: Annotated[float, Doc("Factor of a growth, more than 1.")] = 2.0
    backoff_factor: Annotated[float, Doc("Factor of a backoff, between 0 and 1.")] = 0.5
    growth_interval: Annotated[int, Doc("Good optimizer steps in a row before a growth.")] = 2000
    _: KW_ONLY
    min_scale: Annotated[float | None, Doc("Floor of the scale; None only keeps it above 0.")] = None
    max_scale: Annotated[float | None, Doc("Ceiling of the scale; None means float32's largest number.")] = (
        None
    )
    hysteresis: Annotated[int, Doc("Overflows tolerated before a backoff, the last included.")] = 1
    hysteresis_mode: Annotated[
        HysteresisMode,
        Doc(
            'When that tolerance is restored: ``"apex"`` (any good step), ``"megatron"`` or '
            '``"deepspeed"`` (a whole growth interval).'
        ),
    ] = "apex"
    on_min_scale: Annotated[
        Literal["hold", "raise"],
        Doc('On overflow at the floor: ``"hold"`` it, or ``"raise"`` FloatingPointError.'),
    ] = "hold"
    dynamic: Annotated[
        bool, Doc("False keeps the scale constant; overflowing steps are skipped all the same.")
    ] = True

    def __post_init__(self) -> None:
        for name, wanted in option_types(cast("Any", type(self))).items():
            check_type(name, getattr(self, name), wanted)
        positive("init_scale", self.init_scale)
        checked_growth_factor(self.growth_factor)
        checked_backoff_factor(self.backoff_factor)
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if not self.floor <= self.init_scale <= self.ceiling:
            msg = (
                f"init_scale={self.init_scale} is not between min_scale={self.floor} and "
                f"max_scale={self.ceiling}; change one of the three"
            )
            raise ValueError(msg)

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """Take the options out of values by name; other names are left alone."""
        return cls(**{name: values[name] for name in option_names(cls) if name in values})

    @property
    def floor(self) -> float:
        """The smallest scale."""
        if self.min_scale is None:
            return min(float(torch.finfo(torch.float32).tiny), float(self.init_scale))
        return positive("min_scale", self.min_scale)

    @property
    def ceiling(self) -> float:
        """The largest scale."""
        if self.max_scale is None:
            return float(torch.finfo(torch.float32).max)
        return positive("max_scale", self.max_scale)


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(LossScaleOptions):
    """What GradScaler and the adapters have in common."""

    fp16_gradients: Annotated[
        bool, Doc("True allows parameters in float16, whose gradients lose what is below 6e-8.")
    ] = False
    one_pass: Annotated[bool, Doc("False lets torch's own code step Adam, AdamW and SGD.")] = True
    on_nonfinite: Annotated[
        OnNonfinite,
        Doc(
            'In every precision, a step with a gradient that is not finite changes nothing: ``"skip"``. '
            '``"raise"``: it also raises FloatingPointError; under a loss scale that '
            'adapts, only once it has fallen to 1 or to ``min_scale``. ``"ignore"``: without a loss scale '
            "nothing is checked, as in torch; with one, overflows are skipped all the same."
        ),
    ] = "skip"


@dataclass(frozen=True)
class _Device:
    device: Annotated[str, Doc("Device type of the losses.")] = "cuda"


@dataclass(frozen=True)
class _Others:
    enabled: Annotated[
        bool,
        Doc(
            "False makes the scale None, for bfloat16 and float32: gradients are divided by nothing; "
            "``step`` skips and ``last_step`` reports as ever."
        ),
    ] = True
    _: KW_ONLY
    losses: Annotated[
        Sequence[str],
        Doc(
            "Names of losses with a scale of their own, for ``scale(loss, name=...)``; a loss scaled "
            "without a name has the scaler's."
        ),
    ] = ()
    process_groups: Annotated[Sequence[ProcessGroup], Doc("Groups whose ranks take the same decision.")] = ()
    sharded_groups: Annotated[
        Sequence[ProcessGroup],
        Doc(
            "Groups whose ranks hold different parts of the plain gradients (FSDP1): as "
            "``process_groups``, and norms are added up over them."
        ),
    ] = ()


@dataclass(frozen=True)
class GradScalerOptions(_Others, ScalingOptions, _Device):
    """The arguments of GradScaler; by position in the order of torch's: device, the scale, enabled."""


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(ScalingOptions):
    """What the adapters have in common."""

    eval_precision: Annotated[
        PrecisionName | StockName | torch.dtype | None,
        Doc('Precision of models in evaluation: ``"fp16"``, ``"bf16"`` or ``"fp32"``; None: as in training.'),
    ] = None
    rules: Annotated[
        OpRules | str | Path | None,
        Doc("Op rules other than the default ones, or a YAML file of them, for the whole run."),
    ] = None
    fp32_modules: Annotated[
        Sequence[str],
        Doc(
            'Names of modules (``"encoder.norm"``, ``"blocks.*.norm"``) or of classes (``"LayerNorm"``) '
            "that compute in fp32."
        ),
    ] = ()
    weights: Annotated[
        WeightsName,
        Doc(
            'How weights are stored. ``"fp32"``: those that come in 16 bits become float32 before training; '
            '``"bf16"``: what autocast would cast in bf16, with 16 bits more for each, trained exactly as in '
            'float32; ``"fp16"``: likewise in fp16, with float32 masters; ``"bf16-stochastic"``: in bf16 '
            'alone, rounded at random; ``"bf16-true"``, ``"fp16-true"``: all weights and activations.'
        ),
    ] = "fp32"
    state: Annotated[
        StateName,
        Doc(
            'How optimizers\' moments are kept between steps, of weights in float32 too: ``"fp32"``; '
            '``"bf16"``: in 2 bytes, second moments rounded at random; ``"8bit"``: in codes of 1 byte, with '
            "a unit for each 128 elements."
        ),
    ] = "fp32"
    reduce: Annotated[
        ReduceName,
        Doc(
            'Dtype in which FSDP reduces gradients, and adds up those of micro-batches: ``"fp32"``, or '
            '``"bf16"`` for half the bytes.'
        ),
    ] = "fp32"
    exact_schedulers: Annotated[
        bool, Doc("Wait for the device after each step, so that no scheduler is ever a skipped step ahead.")
    ] = False


@dataclass(frozen=True)
class _Precision:
    precision: Annotated[
        TrainingPrecision | StockName | NameWithWeights | torch.dtype,
        Doc(
            '``"fp16"`` (with a loss scale, on CPU too), ``"bf16"``, ``"fp32"``, or ``"fp8"``: Linear '
            'layers in float8 by torchao, bf16 around them. Lightning\'s names (``"16-mixed"``) and '
            "dtypes are understood."
        ),
    ] = "fp16"


@dataclass(frozen=True, kw_only=True)
class LightningOptions(PrecisionOptions, _Precision):
    """The arguments of AmpPrecision and FabricAmpPrecision."""

    scaler: Annotated[
        Any, Doc("A GradScaler in place of the plugin's own; torch's gives its options and state.")
    ] = None
    float8_config: Annotated[
        Any, Doc('torchao\'s Float8LinearConfig, or the name of its recipe; for ``"fp8"`` only.')
    ] = None


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions(PrecisionOptions):
    """The options of AmpKwargs, of the environment and of YAML files."""

    fold_clip: Annotated[
        bool,
        Doc(
            "True leaves a clip by norm to the step where the optimizer is stepped in one pass or "
            "fused: faster, but ``.grad`` is neither unscaled nor clipped between ``clip_grad_norm_`` "
            "and the step."
        ),
    ] = False
    max_skips_in_a_row: Annotated[
        int,
        Doc(
            "Skipped steps in a row of one optimizer after which ``step()`` raises, with the names of "
            "the parameters; 0 goes on for ever."
        ),
    ] = 50
    report: ReportPath = None
    fp32_outputs: Annotated[
        bool, Doc("Convert what a prepared model returns to fp32, as Accelerate does.")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.max_skips_in_a_row >= 0 and float(self.max_skips_in_a_row).is_integer()):
            msg = (
                f"max_skips_in_a_row={self.max_skips_in_a_row} is not allowed; give a number of optimizer "
                "steps, or 0 to go on for ever"
            )
            raise ValueError(msg)


# -- what is stated of an option -----------------------------------------------------------------


def option_names(options: type) -> tuple[str, ...]:
    """Return the names of the options of one of the dataclasses above, in order."""
    return tuple(option.name for option in fields(options))


@functools.cache
def option_types(options: Any) -> dict[str, Any]:
    """Return name -> type."""
    hints = get_type_hints(options, localns=_other_types())
    return {name: hints[name] for name in option_names(options)}


@functools.cache
def option_docs(options: type) -> dict[str, str]:
    """Return name -> meaning."""
    hints = get_type_hints(options, localns=_other_types(), include_extras=True)
    return {name: hints[name].__metadata__[0].documentation for name in option_names(options)}


def option_defaults(options: type) -> dict[str, Any]:
    """Return name -> default."""
    return {option.name: option.default for option in fields(options)}


def _other_types() -> dict[str, Any]:
    """Return the types that are imported when they are asked for."""
    import torch.distributed as dist  # noqa: PLC0415 -- not there in every build of torch

    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 -- of a room above this floor

    return {"OpRules": OpRules, "ProcessGroup": getattr(dist, "ProcessGroup", Any)}


# -- environment variables -----------------------------------------------------------------------

PREFIX: Final = "AMP_PLUGIN_"
OWN_VARIABLES: Final = (
    "AMP_PLUGIN_NATIVE",
    "AMP_PLUGIN_CACHE_DIR",
    "AMP_PLUGIN_CONFIG",
    "AMP_PLUGIN_TAKEOVER",
)
_OF_OTHERS: Final = ("XDG_CACHE_HOME", "CXX", "MAX_JOBS")
KNOWN_VARIABLES: Final = (
    *OWN_VARIABLES,
    *(PREFIX + option.upper() for option in option_names(AccelerateOptions)),
)


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of the package's variables, misspelt ones included."""
    return {
        name: value for name, value in environment.items() if name.startswith(PREFIX) or name in _OF_OTHERS
    }


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables ``AMP_PLUGIN_...`` that nothing reads, each with a hint, or ``""``."""
    endings = [name.removeprefix(PREFIX) for name in KNOWN_VARIABLES]  # the prefix makes all names look alike
    return {
        name: did_you_mean(name.removeprefix(PREFIX), endings, written=PREFIX.__add__)
        for name in environment
        if name.startswith(PREFIX) and name not in KNOWN_VARIABLES
    }


# -- constructors --------------------------------------------------------------------------------


def takes(
    options: Callable[P, Any], *, by_position: int | None = None, or_none: bool = False
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Make an ``__init__`` take the options of a dataclass; it is called with those given, by name.

    Type checkers, editors, ``help``, ``inspect.signature`` and jsonargparse see each with type and default.
    """
    signature = _signature(options, by_position=by_position, or_none=or_none)

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        def checked(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            refuse_misfits(type(self).__name__, signature, args, kwargs)
            names = [*signature.parameters][1:]
            init(self, **dict(zip(names, args, strict=False)), **kwargs)

        checked.__name__, checked.__qualname__ = init.__name__, init.__qualname__
        checked.__module__, checked.__doc__ = init.__module__, init.__doc__
        checked.__annotations__ = {p.name: p.annotation for p in [*signature.parameters.values()][1:]}
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _signature(options: Any, *, by_position: int | None, or_none: bool) -> inspect.Signature:
    types = option_types(options)
    given = list(inspect.signature(options).parameters.values())
    shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for place, parameter in enumerate(given):
        annotation, default = types[parameter.name], parameter.default
        is_named = by_position is not None and place >= by_position
        shown.append(
            parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY if is_named else parameter.kind,
                annotation=annotation | None if or_none else annotation,
                default=None if or_none else default,
            )
        )
    return inspect.Signature(shown, return_annotation=None)


def lists_options(options: type) -> Callable[[Class], Class]:
    """List the options in the docstring of a class, in place of ``{options}``."""

    def decorate(kind: Class) -> Class:
        lines = [f"{name}: {text}" for name, text in option_docs(options).items()]
        filled = [
            textwrap.fill(line, 110, initial_indent=" " * 8, subsequent_indent=" " * 12) for line in lines
        ]
        kind.__doc__ = (kind.__doc__ or "").replace("        {options}", "\n".join(filled))
        return kind

    return decorate


def unknown_option(source: str, name: object, allowed: Iterable[str]) -> str:
    """Return the error text for an unknown option: the one that may be meant, and the allowed names."""
    allowed = list(allowed)
    hint = did_you_mean(name, allowed)
    allowed_are = f"{hint} Allowed are" if hint else "; allowed are"
    return f"{source}: unknown option {name!r}{allowed_are} {', '.join(allowed)}"


def refuse_misfits(
    owner: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Iterable[str]
) -> None:
    """Raise if arguments do not fit a class."""
    params = list(signature.parameters.values())[1:]
    allowed = [param.name for param in params]
    for name in kwargs:
        if name not in allowed:
            raise TypeError(unknown_option(owner, name, allowed))
        if name in allowed[: len(args)]:
            msg = f"{owner}: {name!r} is given twice, by position and by name; give it by name"
            raise TypeError(msg)
    positional = sum(param.kind is not inspect.Parameter.KEYWORD_ONLY for param in params)
    if len(args) > positional:
        listed = ", ".join(allowed)
        msg = f"{owner}: too many positional arguments; allowed are {listed}: give them by name"
        raise TypeError(msg)


# -- checks --------------------------------------------------------------------------------------

_WORDS: Final = {HysteresisMode, OnNonfinite, Literal["hold", "raise"]}


def check_type(name: str, value: object, wanted: Any) -> None:
    """Raise if a switch, a number or a word of an option is something else; other types are left alone."""
    accepts_none = type(None) in get_args(wanted)
    if wanted is bool:
        flag(name, value)
    elif wanted in {int, float} or (accepts_none and {int, float} & {*get_args(wanted)}):
        number(name, value, none=accepts_none)
    elif get_origin(wanted) is Literal and wanted in _WORDS and value not in get_args(wanted):
        words = [repr(word) for word in get_args(wanted)]
        msg = f"{name}={value!r} is not known; use {', '.join(words[:-1])} or {words[-1]}"
        raise ValueError(msg)


def flag(name: str, value: object) -> None:
    """Raise if an option is neither True nor False."""
    if not isinstance(value, bool):
        msg = f"{name}={value!r} is not allowed; give True or False"
        raise TypeError(msg)


def number(name: str, value: object, *, none: bool = False) -> None:
    """Raise unless an option is a number (or None, where that is allowed)."""
    is_number = isinstance(value, SupportsFloat) and not isinstance(value, bool)
    if not (is_number or (none and value is None)):
        msg = f"{name}={value!r} is not allowed; give a number{' or None' if none else ''}"
        raise TypeError(msg)


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ValueError unless it is finite and above 0."""
    is_number = isinstance(value, SupportsFloat) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        msg = f"{name}={value!r} is not allowed; give a finite number greater than 0"
        raise ValueError(msg)
    return float(value)


def whole(name: str, value: int) -> int:
    """Return ``value`` as an int, or raise ValueError if it is not a whole number above 0."""
    if isinstance(value, bool) or not (value >= 1 and float(value).is_integer()):
        msg = f"{name}={value!r} is not allowed; give a whole number of at least 1"
        raise ValueError(msg)
    return int(value)


def checked_growth_factor(value: float) -> float:
    """Return the growth factor, or raise ValueError if it would not grow the scale."""
    if not (math.isfinite(value) and value > 1.0):
        msg = f"The growth factor must be > 1.0. Got growth_factor={value!r}; the default is 2.0"
        raise ValueError(msg)
    return float(value)


def checked_backoff_factor(value: float) -> float:
    """Return the backoff factor, or raise ValueError if it would not lower the scale."""
    if not 0.0 < value < 1.0:
        msg = f"The backoff factor must be < 1.0 and > 0.0. Got backoff_factor={value!r}; the default is 0.5"
        raise ValueError(msg)
    return float(value)
