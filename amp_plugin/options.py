"""The options of loss scales and precisions.

The types, defaults, checks and meanings of all options are stated only in the dataclasses of this module. The
dataclasses define the constructors of GradScaler, AmpPrecision, FabricAmpPrecision and AmpKwargs through
:func:`takes`, and the docstrings of these classes through :func:`lists_options`. The dataclasses also define
the environment variables ``AMP_PLUGIN_<OPTION>``, the keys of YAML files, and the tables in the documentation
(``docs/api_tables.py``).
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
)

import torch
from torch.distributed import ProcessGroup
from typing_extensions import Doc

from amp_plugin.messages import OptionError, did_you_mean
from amp_plugin.precision import (
    NameWithWeights,
    PrecisionName,
    ReduceName,
    StateName,
    StockName,
    TrainingPrecision,
    WeightsName,
    checked_precision,
    checked_training_precision,
    checked_word,
    refuse_other_precision,
    weights_meant,
)
from amp_plugin.removed import refuse_removed

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules

P = ParamSpec("P")
Class = TypeVar("Class", bound=type)
HysteresisMode = Literal["apex", "megatron", "deepspeed"]
OnNonfinite = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The options that define a spike of the gradient norm or loss, and what is done about it.

    A step is a spike if its norm or loss is more than ``sigma`` standard deviations above the running mean. A
    gradient norm of up to four times the running mean is never a spike. A loss of up to ``sigma`` percent
    above the running mean is not a spike either. The mean and the standard deviation are computed separately
    for each optimizer, over its own steps.

    Args:
        {options}

    Raises:
        OptionError: A value is not allowed.

    Example:
        >>> from amp_plugin import GradScaler, Spike
        >>> scaler = GradScaler("cpu", on_spike=Spike(sigma=8.0, action="clip"))
        >>> GradScaler("cpu", on_spike="skip").core.shared.options.on_spike.warmup
        32
    """

    of: Annotated[
        Literal["norm", "loss"],
        Doc(
            'The value that is compared with its mean. ``"norm"``: the norm of the unscaled gradients before '
            'clipping. ``"loss"``: the sum of the losses that went through ``scale()`` since the last step. '
            "Under torch.distributed it is the mean over all processes."
        ),
    ] = "norm"
    sigma: Annotated[float, Doc("The number of standard deviations above the mean, more than 0.")] = 6.0
    window: Annotated[
        int, Doc("The number of steps over which the mean and the deviation are taken, at least 2.")
    ] = 128
    warmup: Annotated[
        int | None,
        Doc(
            "The number of steps before a step can count as a spike, at most ``window``. None means a "
            "quarter of ``window``."
        ),
    ] = None
    action: Annotated[
        Literal["skip", "clip", "raise"],
        Doc(
            '``"skip"``: the step changes nothing. ``"clip"``: the gradients are clipped to the running '
            'mean of the norm. ``"raise"``: the step is skipped, and ``amp_plugin.SpikeError`` is '
            "raised as soon as the host knows it. Until then, no later step changes the weights."
        ),
    ] = "skip"

    def __post_init__(self) -> None:
        for name, wanted in option_types(cast("Any", Spike)).items():
            object.__setattr__(self, name, checked_option(name, getattr(self, name), wanted))
        between("sigma", self.sigma, 0)
        object.__setattr__(self, "window", whole("window", self.window, least=2))
        warmup = self.window // 4 if self.warmup is None else self.warmup
        object.__setattr__(self, "warmup", whole("warmup", warmup))
        if self.warmup is not None and self.warmup > self.window:
            raise OptionError(option="warmup", value=self.warmup, allowed=f"at most window={self.window}")
        if self.action == "clip" and self.of == "loss":
            allowed = "'skip' or 'raise' with of='loss': gradients are clipped to the running norm"
            raise OptionError(option="action", value=self.action, allowed=allowed)

    @classmethod
    def read(cls, given: Any) -> Spike | None:
        """Return a Spike made from the user's value, which is a Spike, an action, or a mapping of options."""
        if given is None or isinstance(given, Spike):
            return given
        try:
            if isinstance(given, str):
                return cls(action=cast("Any", given))
            return cls(**given)
        except (TypeError, ValueError) as error:
            allowed = "a Spike, 'skip', 'clip' or 'raise', or a mapping with the options of Spike"
            msg = f"on_spike={given!r}: {error}; give {allowed}"
            raise OptionError(option="on_spike", value=given, allowed=allowed, text=msg) from error


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """The options of loss scaling and optimizer steps, accepted by every entry point.

    The first four options can be passed by position, as in ``torch.amp.GradScaler``.

    Raises:
        OptionError: A value has the wrong type, a number is out of range, or a string is not an allowed
            value.
    """

    init_scale: Annotated[float, Doc("The first loss scale.")] = field(default=2.0**16, kw_only=False)
    growth_factor: Annotated[float, Doc("The factor by which the scale grows, more than 1.")] = field(
        default=2.0, kw_only=False
    )
    backoff_factor: Annotated[
        float, Doc("The factor by which an overflow lowers the scale, between 0 and 1.")
    ] = field(default=0.5, kw_only=False)
    growth_interval: Annotated[
        int,
        Doc(
            "The number of steps in a row without an overflow after which the scale grows. With several "
            "optimizers, their steps between two updates of the scale count as one step."
        ),
    ] = field(default=2000, kw_only=False)
    min_scale: Annotated[float | None, Doc("The smallest scale. None only keeps the scale above 0.")] = None
    max_scale: Annotated[float | None, Doc("The largest scale. None means float32's largest number.")] = None
    hysteresis: Annotated[
        int, Doc("The number of overflows after which the scale is lowered. With 1, each overflow lowers it.")
    ] = 1
    hysteresis_mode: Annotated[
        HysteresisMode,
        Doc(
            'When the count of ``hysteresis`` starts again: ``"apex"`` (after any step without an '
            'overflow), ``"megatron"`` or ``"deepspeed"`` (after a whole growth interval).'
        ),
    ] = "apex"
    on_min_scale: Annotated[
        Literal["hold", "raise"],
        Doc(
            'What an overflow at the smallest scale does: ``"hold"`` keeps the scale, ``"raise"`` raises '
            "FloatingPointError."
        ),
    ] = "hold"
    dynamic: Annotated[
        bool, Doc("False keeps the scale constant. Steps with an overflow are still skipped.")
    ] = True
    fp16_gradients: Annotated[
        bool, Doc("True allows parameters in float16. Their gradients lose values below 6e-8.")
    ] = False
    one_pass: Annotated[
        bool,
        Doc(
            "True lets amp_plugin take a whole optimizer step with one op, if it has a rule for the "
            "optimizer. False always calls the optimizer's own ``step()``."
        ),
    ] = True
    on_nonfinite: Annotated[
        OnNonfinite,
        Doc(
            'What a step with an inf or nan in a gradient does, in every precision. ``"skip"``: the '
            'step changes nothing. ``"raise"``: it also raises FloatingPointError. With a dynamic loss '
            'scale it raises only once the scale has fallen to 1 or to ``min_scale``. ``"ignore"``: '
            "without a loss scale gradients are not checked, as in torch. With a loss scale, overflows "
            "are still skipped."
        ),
    ] = "skip"
    on_spike: Annotated[
        Spike | Mapping[str, Any] | Literal["skip", "clip", "raise"] | None,
        Doc(
            "What to do about a step whose gradient norm or loss is far above its running mean: a "
            'Spike, only its action (``"skip"``, ``"clip"``, ``"raise"``), or a mapping with its '
            "options. None does nothing."
        ),
    ] = None

    log: Annotated[
        str | Path | Callable[[Any], Any] | None,
        Doc(
            "Where each step is recorded: a file that gets one line of JSON for each step "
            "(``run.jsonl``), or a function that is called with an ``amp_plugin.StepRecord``. Only rank "
            "0 writes. None records nothing."
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, wanted in option_types(cast("Any", type(self))).items():
            object.__setattr__(self, name, checked_option(name, getattr(self, name), wanted))
        between("init_scale", self.init_scale, 0)
        between("growth_factor", self.growth_factor, 1)
        between("backoff_factor", self.backoff_factor, 0, 1)
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        object.__setattr__(self, "on_spike", Spike.read(self.on_spike))
        if not (self.log is None or isinstance(self.log, str | Path) or callable(self.log)):
            raise OptionError(option="log", value=self.log, allowed="the path of a file, or a function")
        if self.on_spike is not None and self.on_nonfinite == "ignore":
            allowed = (
                "on_spike together with on_nonfinite='skip' or 'raise': with 'ignore' gradients are not "
                "measured"
            )
            raise OptionError(
                option="on_spike", value=self.on_spike, allowed=allowed, others=("on_nonfinite",)
            )
        if not self.floor <= self.init_scale <= self.ceiling:
            limits = f"between min_scale={self.floor} and max_scale={self.ceiling}"
            msg = f"init_scale={self.init_scale} is not {limits}; change one of the three"
            raise OptionError(
                option="init_scale",
                value=self.init_scale,
                allowed=limits,
                text=msg,
                others=("min_scale", "max_scale"),
            )

    @property
    def floor(self) -> float:
        """The smallest scale."""
        if self.min_scale is None:
            return min(float(torch.finfo(torch.float32).tiny), float(self.init_scale))
        return between("min_scale", self.min_scale, 0)

    @property
    def ceiling(self) -> float:
        """The largest scale."""
        if self.max_scale is None:
            return float(torch.finfo(torch.float32).max)
        return between("max_scale", self.max_scale, 0)


@dataclass(frozen=True)
class _Device:
    device: Annotated[str, Doc("The device type of the losses.")] = "cuda"


@dataclass(frozen=True, kw_only=True)
class GradScalerOptions(LossScaleOptions, _Device):
    """The arguments of GradScaler.

    As in ``torch.amp.GradScaler``, ``device`` comes first, and ``enabled`` comes after the options of the
    loss scale.
    """

    enabled: Annotated[
        bool,
        Doc(
            "False turns the loss scale off, for bfloat16 and float32. Gradients are then not divided. "
            "Steps with an inf or nan are still skipped, and ``last_step`` still reports."
        ),
    ] = field(default=True, kw_only=False)
    losses: Annotated[
        Sequence[str],
        Doc(
            "Names of losses that have a loss scale of their own, for ``scale(loss, name=...)``. A loss "
            "without a name uses the scaler's loss scale."
        ),
    ] = ()
    process_groups: Annotated[
        Sequence[ProcessGroup],
        Doc("Process groups whose ranks skip the same steps and have the same loss scale."),
    ] = ()
    sharded_groups: Annotated[
        Sequence[ProcessGroup],
        Doc(
            "Process groups whose ranks hold different parts of the gradients as ordinary tensors "
            "(FSDP1). They work like ``process_groups``, but norms are also combined over their ranks."
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(LossScaleOptions):
    """The options of a precision, shared by the entry points of all frameworks.

    Precision names of other libraries are translated to the names used here. Op rules are read from the file
    or the mapping that the user gives.
    """

    eval_precision: Annotated[
        PrecisionName | StockName | torch.dtype | None,
        Doc(
            'The precision of evaluation: ``"fp16"``, ``"bf16"`` or ``"fp32"``. None means the same as in '
            "training."
        ),
    ] = None
    rules: Annotated[
        OpRules | Mapping[str, Any] | str | Path | None,
        Doc(
            "The op rules of the whole run, instead of the default ones: an OpRules, the path of a YAML "
            "file, or a mapping with the keys of that file."
        ),
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
            'How weights are stored. ``"fp32"``: in float32; weights that come in 16 bits are converted '
            'before training. ``"bf16"``: weights that autocast would cast are stored in bf16 with a '
            '16-bit remainder, and are trained exactly as in float32. ``"fp16"``: the same weights in '
            'fp16, with a float32 copy. ``"bf16-stochastic"``: the same weights in bf16 without a '
            'remainder, with stochastic rounding. ``"bf16-true"``, ``"fp16-true"``: all weights, and '
            "activations too, are in 16 bits."
        ),
    ] = "fp32"
    state: Annotated[
        StateName,
        Doc(
            "How optimizers store their moments between steps, for any value of ``weights``. "
            '``"fp32"``: in 4 bytes. ``"bf16"``: in 2 bytes; second moments are rounded stochastically. '
            '``"8bit"``: in 1 byte, with one scale for each 128 elements.'
        ),
    ] = "fp32"
    formats: Annotated[
        Mapping[str, str] | str | Path | None,
        Doc(
            "Formats of some Linear layers, if they differ from ``precision``: a mapping from a pattern "
            'of names or a class name to ``"bf16"``, ``"fp8"``, ``"fp8-rowwise"``, ``"mxfp8"`` or '
            '``"nvfp4"``, or the path of a YAML file with it. The first pattern that matches a layer '
            "decides. All other ops compute in bf16."
        ),
    ] = None
    emulate: Annotated[
        bool,
        Doc("Emulate formats below 16 bits. This gives the right numbers on any device, but it is slow."),
    ] = False
    reduce: Annotated[
        ReduceName,
        Doc(
            'The dtype in which FSDP reduces gradients and adds up those of micro-batches: ``"fp32"``, '
            'or ``"bf16"``, which sends half the bytes.'
        ),
    ] = "fp32"
    exact_schedulers: Annotated[
        bool,
        Doc(
            "Wait for the device after each step, so that a learning rate scheduler never advances at a "
            "skipped step."
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.fp32_modules
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(name, str) and name for name in names):
            raise OptionError(option="fp32_modules", value=names, allowed="a list of names: ['LayerNorm']")
        if self.eval_precision is not None:
            known = checked_precision("eval_precision", self.eval_precision)
            object.__setattr__(self, "eval_precision", known)
            refuse_other_precision(self.weights, known, named="eval_precision")
        object.__setattr__(self, "rules", _read_rules(self.rules))


@dataclass(frozen=True)
class _Precision:
    precision: Annotated[
        TrainingPrecision | StockName | NameWithWeights | torch.dtype,
        Doc(
            '``"fp16"`` (with a loss scale, on a CPU too), ``"bf16"`` or ``"fp32"``. ``"auto"``: bf16 '
            'if the device computes it fast, else fp16, else fp32. ``"fp8"``, ``"fp8-rowwise"``, '
            '``"mxfp8"``, ``"nvfp4"``: Linear layers compute in that format by torchao, and all other '
            'ops in bf16. Lightning\'s names (``"16-mixed"``) and dtypes are allowed too.'
        ),
    ] = "fp16"


@dataclass(frozen=True, kw_only=True)
class PluginOptions(PrecisionOptions, _Precision):
    """The arguments of AmpPrecision and FabricAmpPrecision, which include the precision."""

    device: Annotated[
        str | None,
        Doc(
            "The device type. Training on another one raises an error. None means the device type on which "
            "training runs."
        ),
    ] = None
    scaler: Annotated[
        Any,
        Doc(
            "A GradScaler that replaces the plugin's own. If it is a scaler of torch, its options and state "
            "are copied."
        ),
    ] = None
    recipe: Annotated[
        Any,
        Doc(
            "torchao's configuration of a precision below 16 bits (Float8LinearConfig, "
            "MXFP8TrainingOpConfig or NVFP4TrainingConfig), or the name of a recipe, such as "
            '``"rowwise"``.'
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", weights_meant(self.precision, self.weights))
        object.__setattr__(self, "precision", checked_training_precision(self.precision))
        super().__post_init__()
        if self.precision != "auto":  # the session knows what it stands for
            refuse_other_precision(self.weights, str(self.precision))


@dataclass(frozen=True, kw_only=True)
class RunOptions(PrecisionOptions):
    """The options of a training run, for entry points that cannot use a callback such as AmpMonitor."""

    max_skips_in_a_row: Annotated[
        int,
        Doc(
            "The number of skipped steps in a row of one optimizer after which the run ends with an error "
            "that names the parameters. 0 means no limit."
        ),
    ] = 50
    report: Annotated[
        str | Path | None,
        Doc(
            "The path of the run page, an HTML report that is rewritten during training (see "
            "``amp_plugin.report``). The run page waits for the device at each step."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("max_skips_in_a_row", self.max_skips_in_a_row, least=0)


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions(RunOptions):
    """The options that AmpKwargs, the environment variables and YAML files can set."""

    fp32_outputs: Annotated[
        bool, Doc("Convert the outputs of a prepared model to fp32, as Accelerate does.")
    ] = True


# -- names, types, texts and defaults --


def option_names(options: type) -> tuple[str, ...]:
    """Return the option names of a dataclass in this module, in the order of its fields."""
    return tuple(option.name for option in fields(options))


def loss_scale_options(options: Any) -> dict[str, Any]:
    """Return an entry point's loss-scale options as a dict from name to value."""
    return {name: getattr(options, name) for name in option_names(LossScaleOptions)}


@functools.cache
def option_types(options: Any) -> dict[str, Any]:
    """Return a dict from the name of each option to its type."""
    return {name: hint.__origin__ for name, hint in _annotations(options).items()}


@functools.cache
def option_docs(options: type) -> dict[str, str]:
    """Return a dict from the name of each option to its description."""
    return {name: hint.__metadata__[0].documentation for name, hint in _annotations(options).items()}


def option_defaults(options: type) -> dict[str, Any]:
    """Return a dict from the name of each option to its default."""
    return {option.name: option.default for option in fields(options)}


@functools.cache
def _annotations(options: type) -> dict[str, Any]:
    """Return a dict from the name of each option to ``Annotated[type, Doc(description)]``, in order."""
    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - late: casting is a layer above

    found: dict[str, Any] = {}
    for kind in reversed(options.__mro__):
        found |= inspect.get_annotations(kind, locals={"OpRules": OpRules}, eval_str=True)
    return {name: found[name] for name in option_names(options)}


def _read_rules(given: OpRules | Mapping[str, Any] | str | Path | None) -> OpRules | None:
    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - late: casting is a layer above

    if given is None or isinstance(given, OpRules):
        return given
    try:
        return OpRules.from_mapping(given) if isinstance(given, Mapping) else OpRules.from_yaml(given)
    except (OSError, TypeError, ValueError) as error:
        allowed = "an OpRules or the path of a YAML file of rules, or a mapping with its keys"
        msg = f"rules={given!r}: {error}; give {allowed}"
        raise OptionError(option="rules", value=given, allowed=allowed, text=msg) from error


# -- environment variables -------------

PREFIX: Final = "AMP_PLUGIN_"
CONFIG: Final = "AMP_PLUGIN_CONFIG"
OWN_VARIABLES: Final = ("AMP_PLUGIN_NATIVE", "AMP_PLUGIN_CACHE_DIR", CONFIG, "AMP_PLUGIN_TAKEOVER")
_PRECISION = "AmpAccelerator(mixed_precision=...) or ACCELERATE_MIXED_PRECISION"
_NOT_OURS: Final = {"mixed_precision": _PRECISION, "MIXED_PRECISION": _PRECISION}
KNOWN_VARIABLES: Final = (
    *OWN_VARIABLES,
    *(PREFIX + option.upper() for option in option_names(AccelerateOptions)),
)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from each unknown variable ``AMP_PLUGIN_...`` to a hint about its name, or to ``""``."""
    # Names are compared without the prefix, because the prefix makes all of them similar.
    known = _NOT_OURS | {name.removeprefix(PREFIX): name for name in KNOWN_VARIABLES}
    return {
        name: did_you_mean(name.removeprefix(PREFIX), known, written=known.__getitem__)
        for name in environment
        if name.startswith(PREFIX) and name not in KNOWN_VARIABLES
    }


# -- constructors ----------------------


def takes(
    options: Callable[P, Any], *, by_position: int | None = None, or_none: bool = False
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Make an ``__init__`` accept the fields of an options dataclass, and show them in its signature.

    The decorated ``__init__`` receives the options that the caller gave, as keyword arguments.
    """
    types, kinds = option_types(options), inspect.Parameter
    shown = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    for place, parameter in enumerate(inspect.signature(options).parameters.values()):
        kind, annotation, default = parameter.kind, types[parameter.name], parameter.default
        if by_position is not None and place >= by_position:
            kind = kinds.KEYWORD_ONLY
        if or_none:
            annotation, default = annotation | None, None
        shown.append(parameter.replace(kind=kind, annotation=annotation, default=default))
    signature = inspect.Signature(shown, return_annotation=None)

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(init)
        def checked(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(**bind(type(self).__name__, signature, self, *args, **kwargs))

        checked.__annotations__ = {p.name: p.annotation for p in [*signature.parameters.values()][1:]}
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def shows(
    stated: Callable[P, None], signature: inspect.Signature
) -> Callable[[Callable[..., None]], Callable[P, None]]:
    """Give an ``__init__`` the signature that ``inspect.signature`` and type checkers show."""

    def decorate(init: Callable[..., None]) -> Callable[P, None]:
        init.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Callable[P, None]", init)

    del stated
    return decorate


def lists_options(options: type) -> Callable[[Class], Class]:
    """Replace ``{options}`` in a class's docstring with the list of its options."""

    def decorate(kind: Class) -> Class:
        before, place, after = (kind.__doc__ or "").partition("{options}")
        # Python 3.13 and newer remove the indentation of a class's docstring.
        indent = before.rpartition("\n")[2]
        filled = textwrap.TextWrapper(110, initial_indent=indent, subsequent_indent=f"{indent}    ").fill
        lines = [filled(f"{name}: {text}") for name, text in option_docs(options).items()]
        if place:
            kind.__doc__ = before.removesuffix(indent) + "\n".join(lines) + after
        return kind

    return decorate


# Spike is defined before ``lists_options``, because a field of LossScaleOptions has this type.
lists_options(Spike)(Spike)


def unknown_option(source: str, name: object, allowed: Sequence[str]) -> str:
    """Return the error text for an unknown option, with the most similar name and all allowed names."""
    hint = did_you_mean(name, allowed, aliases=None if "precision" in allowed else _NOT_OURS)
    allowed_are = f"{hint} Allowed are" if hint else "; allowed are"
    return f"{source}: unknown option {name!r}{allowed_are} {', '.join(allowed)}"


def bind(owner: str, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an ``__init__`` by name.

    An unknown argument raises TypeError with the allowed names.
    """
    allowed = [*signature.parameters][1:]
    for name in kwargs:
        if name not in allowed:
            refuse_removed(owner, [name])
            raise TypeError(unknown_option(owner, name, allowed))
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        msg = f"{owner}: {error}; give options by name; allowed are {', '.join(allowed)}"
        raise TypeError(msg) from None


# -- checks ----------------------------


def checked_option(name: str, value: Any, wanted: Any) -> Any:
    """Return the checked value of an option. Words are returned in our spelling.

    Raises:
        OptionError: the value has the wrong type, or is not one of the allowed words.
    """
    if get_origin(wanted) is Literal:
        return checked_word(name, value, wanted)
    kinds = {wanted, *get_args(wanted)}
    if wanted is bool and not isinstance(value, bool):
        raise OptionError(name, value, "True or False")
    is_missing = value is None and type(None) in kinds
    if kinds & {int, float} and not (_is_number(value) or is_missing):
        raise OptionError(name, value, f"a number{' or None' if type(None) in kinds else ''}")
    return value


def between(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return ``value`` as a float; raise OptionError unless it lies strictly between ``low`` and ``high``."""
    if not (_is_number(value) and low < float(value) < high):
        limits = f"more than {low:g}" + (f" and less than {high:g}" if high < math.inf else "")
        raise OptionError(name, value, f"a finite number, {limits}")
    return float(value)


def whole(name: str, value: int, least: int = 1) -> int:
    """Return ``value`` as an int; raise OptionError unless it is a whole number of at least ``least``."""
    if not (_is_number(value) and value >= least and float(value).is_integer()):
        raise OptionError(name, value, f"a whole number of at least {least}")
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, bool)
