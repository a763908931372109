"""Read a config from a YAML file and ``key=value`` overrides, and check it against a schema."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from amp_plugin.messages import did_you_mean
from recipes.bounds import out_of_bounds
from recipes.shared import ConfigError

Schema = TypeVar("Schema")
ROOT = Path(__file__).resolve().parent.parent


def config_from_command_line(
    schema: type[Schema],
    *,
    default: str,
    about: str,
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> Schema:
    """Read ``[--config FILE] [key=value ...]`` and return a checked config.

    Args:
        schema: A dataclass with a type and a default for each key.
        default: The path of the YAML file that is used if ``--config`` is not given. The path is relative to
            the root of the repository.
        about: The program description that ``--help`` shows.
        arguments: The command-line arguments. None means the arguments of this process.
        program: The name of the program in ``--help`` and errors. None means the name of the script that this
            process runs.

    Raises:
        SystemExit: The config is wrong. The reason is printed.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=about,
        epilog=f"keys, as in {default}:\n\n{(ROOT / default).read_text(encoding='utf-8')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=str(ROOT / default), help=f"YAML file (default: {default})")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that replace those of the file"
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    given, unknown = parser.parse_known_args(arguments)
    with config_errors(parser.prog):
        if unknown:
            raise ConfigError(_unknown_option(unknown[0], arguments))
        return load_config(schema, Path(given.config), given.overrides)


@contextmanager
def config_errors(program: str) -> Iterator[None]:
    """Turn a ConfigError into one line on standard error and exit code 2.

    Args:
        program: The name of the program, which is printed before the error.

    Raises:
        SystemExit: A ``ConfigError`` was raised.
    """
    try:
        yield
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def make_folder(output: str, name: str) -> Path:
    """Create a folder for the results of a run before the run starts. Return the path of the folder.

    Args:
        output: The folder for the results of all runs, as set in the config.
        name: The name of the new folder in it.

    Raises:
        ConfigError: The folder cannot be created.
    """
    folder = Path(output) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"output={output} is not allowed; {folder} cannot be made: {error.strerror}"
        raise ConfigError(msg) from error
    return folder


def _unknown_option(option: str, arguments: Sequence[str]) -> str:
    name, _, value = option.partition("=")
    following = arguments[arguments.index(option) + 1 :]
    if not value and following and "=" not in following[0] and not following[0].startswith("--"):
        value = following[0]
    key = name.lstrip("-").replace("-", "_")
    return f"unknown option {option!r}; keys of the config have no dashes, write {key}={value or '...'}"


def load_config(schema: type[Schema], path: Path, overrides: Sequence[str] = ()) -> Schema:
    """Merge a schema's defaults, a YAML file and overrides into a checked config.

    Args:
        schema: A dataclass with a type and a default for each key.
        path: The YAML file.
        overrides: Texts ``"key=value"``. Nested keys contain dots.

    Raises:
        ConfigError: The file does not exist, an override has no ``=``, a key is unknown, or a value has the
            wrong type or is out of bounds.
    """
    if not path.is_file():
        names = ", ".join(sorted(found.name for found in path.parent.glob("*.yaml")))
        msg = f"config file {path} does not exist; beside it there is {names or 'no YAML file'}"
        raise ConfigError(msg)
    for override in overrides:
        if "=" not in override:
            msg = f"override {override!r} has no '='; write key=value, for example epochs=5"
            raise ConfigError(msg)
    base = OmegaConf.structured(schema)
    merged = _merge(base, base, _read(path), str(path))
    typed = OmegaConf.from_dotlist([*overrides])
    config = OmegaConf.to_object(_merge(base, merged, typed, "command line"))
    for key, value, allowed in out_of_bounds(config):
        given = OmegaConf.select(typed, key)
        source, given = (path, value) if given is None else ("command line", given)
        msg = f"{source}: {key}={given} is not allowed; it must be {allowed}"
        raise ConfigError(msg)
    return config  # type: ignore[return-value]


def _read(path: Path) -> Any:
    try:
        return OmegaConf.load(path)
    except (YAMLError, OSError) as error:
        msg = f"{path} is no YAML: {error}"
        raise ConfigError(msg) from error


def _merge(base: DictConfig, config: Any, layer: Any, source: str) -> Any:
    try:
        return OmegaConf.merge(config, layer)
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key(base, str(error.full_key), source)) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if error.full_key:
            expected = _type_name(base, str(error.full_key))
            msg = f"{source}: {error.full_key} must be {expected}: {reason}"
        else:  # a section was given a single value
            msg = f"{source}: {reason}; a section takes keys of its own, written section.key=value"
        raise ConfigError(msg) from error


def _unknown_key(base: DictConfig, key: str, source: str) -> str:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    allowed = [str(known) for known in node] if isinstance(node, DictConfig) else []
    hint = did_you_mean(name, allowed, written=lambda near: f"{parent}.{near}".lstrip("."))
    return f"{source}: unknown key {key!r}; allowed are {', '.join(allowed)}{hint}"


def _type_name(base: DictConfig, key: str) -> str:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind) or name not in get_type_hints(kind):
        return "as in the schema"
    hint = get_type_hints(kind)[name]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    return getattr(hint, "__name__", str(hint))
