"""AmpKwargs: what a user may set beyond ``mixed_precision``, and where each value comes from.

One order of precedence; the first source that names an option decides it::

    AmpKwargs(...) in kwargs_handlers          the program
    GradScalerKwargs(...) in kwargs_handlers
    AMP_PLUGIN_<OPTION>                        the environment of the launch
    the YAML file named by AMP_PLUGIN_CONFIG
    the default
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from accelerate.utils import AutocastKwargs, GradScalerKwargs, KwargsHandler

from amp_plugin.adapters.option_checks import rules_from
from amp_plugin.casting.rules import OpRules
from amp_plugin.environment_variables import PREFIX, unknown_variables
from amp_plugin.options import (
    AccelerateOptions,
    LossScaleOptions,
    lists_options,
    option_names,
    option_types,
    takes,
    unknown_option,
)
from amp_plugin.precision import PrecisionName, checked_precision

Made = TypeVar("Made")
CONFIG = "AMP_PLUGIN_CONFIG"


OPTIONS = option_names(AccelerateOptions)


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


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(AccelerateOptions):
    """The options, read: precisions in our own names, rules from their file."""

    eval_precision: PrecisionName | None = None
    rules: OpRules | None = None


def refuse_misplaced(owner: str, names: Iterable[str]) -> None:
    """Raise if an option of AmpKwargs is given to the accelerator itself.

    Raises:
        TypeError: it is; the text says where to write it.
    """
    option = next((name for name in names if name in OPTIONS), None)
    if option is not None:
        msg = (
            f"{owner}: {option!r} is an option of AmpKwargs: "
            f"write {owner}(kwargs_handlers=[AmpKwargs({option}=...)])"
        )
        raise TypeError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options in force.

    Attributes:
        values: option -> value; options that are not set are absent.
        sources: option -> what set it.
        enabled: ``GradScalerKwargs(enabled=...)``.
        cache_enabled: ``AutocastKwargs(cache_enabled=...)``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    enabled: bool = True
    cache_enabled: bool | None = None

    def get(self, option: str, default: Any = None) -> Any:
        """Return an option's value, or ``default`` if it is not set."""
        return self.values.get(option, default)

    def loss_scale(self) -> LossScaleOptions:
        """Return the loss scale's options.

        Raises:
            ValueError: a number is out of range; the text names what set it.
        """
        return self.build(lambda: LossScaleOptions.among(self.values))

    def adapter(self) -> AdapterOptions:
        """Return all options, with their defaults.

        Raises:
            ValueError: a number is out of range; the text names what set it.
        """
        return self.build(lambda: AdapterOptions(**self.values))

    def build(self, make: Callable[[], Made]) -> Made:
        """Call ``make``; a ValueError about an option also names what set it.

        Raises:
            ValueError: as ``make``'s, with the sources.
        """
        try:
            return make()
        except ValueError as error:
            named = [f"{name} comes from {self.sources[name]}" for name in self.values if name in str(error)]
            if not named:
                raise
            msg = f"{error} ({'; '.join(named)})"
            raise ValueError(msg) from error


def resolve(handlers: Iterable[KwargsHandler], environment: Mapping[str, str]) -> Settings:
    """Decide each option by the order of precedence above.

    Args:
        handlers: the program's ``kwargs_handlers``; several AmpKwargs: the first that names an option.
        environment: usually ``os.environ``.

    Raises:
        ValueError: an unknown option or a bad value; the text names its source.
        FileNotFoundError: ``AMP_PLUGIN_CONFIG`` names no file.
    """
    handlers = list(handlers)
    layers = [("AmpKwargs", given.to_kwargs()) for given in handlers if isinstance(given, AmpKwargs)]
    scaling = [given.to_kwargs() for given in handlers if isinstance(given, GradScalerKwargs)]
    enabled = all(given.pop("enabled", True) for given in scaling)
    layers += [("GradScalerKwargs", given) for given in scaling]
    layers += [*_from_environment(environment), *_from_file(environment)]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, given in layers:
        for name, value in given.items():
            if name not in values:
                values[name], sources[name] = _checked(name, value, source), source
    region = next((given for given in handlers if isinstance(given, AutocastKwargs)), AutocastKwargs())
    return Settings(
        values=values,
        sources=sources,
        enabled=enabled,
        cache_enabled=region.cache_enabled,
    )


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    for variable, hint in unknown_variables(environment).items():
        allowed = f"; allowed are {', '.join([*known, CONFIG])}; unset it"
        msg = f"the environment sets {variable}, which is no option{hint or allowed}"
        raise ValueError(msg)
    return [
        (variable, {known[variable]: environment[variable]}) for variable in known if variable in environment
    ]


def _from_file(environment: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    if not environment.get(CONFIG):
        return []
    path = Path(environment[CONFIG])
    if not path.is_file():
        msg = f"{CONFIG}={path} is no file; give the path of a YAML file with AmpKwargs' options, or unset it"
        raise FileNotFoundError(msg)
    source = f"{CONFIG}={path}"
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(given, dict):
        msg = f"{source} holds no mapping; write lines such as 'init_scale: 1024'"
        raise ValueError(msg)  # noqa: TRY004 - the file's content is wrong, not a type
    for name in given:
        if name not in OPTIONS:
            raise ValueError(unknown_option(source, name, OPTIONS))
    return [(source, {name: value for name, value in given.items() if value is not None})]


def _checked(name: str, value: Any, source: str) -> Any:
    """Return ``value`` as the option's type, from text too."""
    wanted = option_types(AccelerateOptions)[name]
    if type(None) in get_args(wanted):
        wanted = get_args(wanted)[0]  # of ``T | None``
    if name in _PARSERS:
        return _PARSERS[name](name, value, source)
    if wanted is bool:
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        return _require(words.get(str(value).lower()), name, value, source, "true or false")
    if get_origin(wanted) is Literal:
        allowed = get_args(wanted)
        return _require(value if value in allowed else None, name, value, source, " or ".join(allowed))
    number = _number(value)
    if wanted is int:
        whole = int(number) if number is not None and number.is_integer() else None
        return _require(whole, name, value, source, "a whole number")
    return _require(number, name, value, source, "a number")


def _names(option: str, value: Any, source: str) -> tuple[str, ...]:
    """Return a list of names, also from text with commas, as in a variable of the environment."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) and name for name in names)
    return tuple(_require(names if is_list else None, option, value, source, "a list of names"))


_PARSERS: dict[str, Callable[[str, Any, str], Any]] = {
    "eval_precision": checked_precision,
    "fp32_modules": _names,
    "rules": lambda _, value, source: rules_from(value, source),
}


def _require(parsed: Any, name: str, value: Any, source: str, allowed: str) -> Any:
    if parsed is None:
        msg = f"{name}={value!r} from {source} is not allowed; give {allowed}"
        raise ValueError(msg)
    return parsed


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
