"""Reads options from environment variables and a YAML file. Options set by the program come first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from configparser import RawConfigParser
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml

from amp_plugin.messages import naming, warn_user
from amp_plugin.options import (
    CONFIG,
    PREFIX,
    AccelerateOptions,
    option_names,
    option_types,
    unknown_option,
    unknown_variables,
)

OPTIONS: Final = option_names(AccelerateOptions)
Options = TypeVar("Options")


def resolved(
    kind: type[Options],
    stated: Iterable[tuple[str, Mapping[str, Any]]],
    environment: Mapping[str, str],
    *,
    door: str = "",
) -> tuple[Options, dict[str, str]]:
    """Return the validated options, and a dict that maps each option to the source that has set it.

    Args:
        kind: the class of the options.
        stated: the options that the program sets, as pairs of a source's name and a dict from option to
            value. If several sources set an option, the first one wins.
        environment: the environment variables, which can set options that the program does not set.
        door: the framework's name, for the warning about an option that has no effect in this framework.

    Raises:
        OptionError: a value is not allowed. The error names the source that set it.
    """
    given, sources = decided([*stated, *outside_program(environment)])
    for other in sorted(given.keys() - {*option_names(kind)}):
        warn_user(
            f"{other} from {sources.pop(other)} has no effect in {door}, because it is an option for "
            "Accelerate only"
        )
        del given[other]
    with naming(sources):
        return kind(**given), sources


def decided(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge options from several sources. Return a dict from option to value, and one from option to source.

    If several sources set an option, the first source wins.
    """
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, values in reversed([*layers]):
        given |= values
        sources |= dict.fromkeys(values, source)
    return given, sources


def outside_program(environment: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the options from environment variables, then from the YAML file in ``AMP_PLUGIN_CONFIG``.

    Each entry is a pair of a source's name and a dict from option to value.
    """
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    for variable, hint in unknown_variables(environment).items():
        allowed = f"; allowed are {', '.join([*known, CONFIG])}; unset it"
        msg = f"the environment sets {variable}, which is not an option{hint or allowed}"
        raise ValueError(msg)
    present = [variable for variable in known if variable in environment]
    layers = [(variable, {known[variable]: environment[variable]}) for variable in present]
    return [(source, read_all(given)) for source, given in [*layers, *_from_file(environment)]]


def read_all(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert string values, such as those of environment variables, to the types of the options.

    Values that cannot be converted are rejected by a later check.
    """
    return {name: _read(name, value) for name, value in given.items()}


def _from_file(environment: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    if not environment.get(CONFIG):
        return []
    path = Path(environment[CONFIG])
    if not path.is_file():
        msg = f"{CONFIG}={path} is not a file; give a YAML file with AmpKwargs' options, or unset it"
        raise FileNotFoundError(msg)
    source = f"{CONFIG}={path}"
    try:
        given = {**yaml.safe_load(path.read_text(encoding="utf-8"))}
    except (TypeError, yaml.YAMLError) as error:
        msg = f"{source} holds no mapping; write lines such as 'init_scale: 1024': {error}"
        raise ValueError(msg) from error
    for name in given:
        if name not in OPTIONS:
            raise ValueError(unknown_option(source, name, OPTIONS))
    return [(source, {name: value for name, value in given.items() if value is not None})]


def _read(name: str, value: Any) -> Any:
    wanted = option_types(AccelerateOptions)[name]
    kinds = {wanted, *get_args(wanted)}
    if bool in kinds:
        return RawConfigParser.BOOLEAN_STATES.get(str(value).lower(), value)
    if name == "fp32_modules":
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value
    if name == "on_spike" and isinstance(value, str):
        # The value of on_spike is a word, or a mapping such as "{of: loss, sigma: 8}".
        return yaml.safe_load(value)
    if kinds & {int, float} and isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            return int(number) if int in kinds and number.is_integer() else number
    return value
