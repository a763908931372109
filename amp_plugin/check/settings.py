"""Reads the settings of ``amp-plugin check`` from pyproject.toml and the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_plugin.messages import did_you_mean
from amp_plugin.mistakes import MISTAKES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = ("select", "ignore", "exclude", "baseline")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a check, with the rules to check and the paths to leave out.

    Attributes:
        select: codes of the rules to check, or prefixes of codes ("AMP01" selects AMP010 to AMP019). If
            ``select`` is empty, all rules are checked.
        ignore: codes of the rules to leave out, or prefixes of codes.
        exclude: patterns of paths to leave out, such as ``tests/*``, relative to ``root``.
        baseline: the file of known mistakes (baseline), or None.
        root: the folder of pyproject.toml.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    baseline: Path | None = None
    root: Path = Path()

    def __post_init__(self) -> None:
        for option in ("select", "ignore"):
            for code in getattr(self, option):
                if not any(known.startswith(code) for known in MISTAKES) or not code:
                    hint = did_you_mean(code, MISTAKES)
                    msg = f"{option}: {code!r} is not a rule{hint}; the rules are AMP001 to {max(MISTAKES)}"
                    raise ValueError(msg)

    def wants(self, code: str) -> bool:
        """Return whether the rule that has this code is checked."""
        return code.startswith(self.select or ("",)) and not (self.ignore and code.startswith(self.ignore))

    @classmethod
    def of_project(
        cls, folder: Path, *, select: Sequence[str], ignore: Sequence[str], baseline: Path | None
    ) -> Settings:
        """Return the settings of the nearest pyproject.toml. Command-line options override them.

        Raises:
            ValueError: a setting is unknown or has the wrong type, or the file is not valid TOML.
        """
        file = next(
            (f for f in (p / "pyproject.toml" for p in (folder, *folder.parents)) if f.is_file()), None
        )
        table = _table(file) if file is not None else {}
        known = table.get("baseline")
        return cls(
            select=tuple(select) or tuple(table.get("select", ())),
            ignore=(*ignore, *table.get("ignore", ())),
            exclude=tuple(table.get("exclude", ())),
            baseline=baseline or (file.parent / known if file is not None and known else None),
            root=file.parent if file is not None else folder,
        )


def _table(file: Path) -> dict[str, Any]:
    """Read and validate the table [tool.amp-plugin.check] of a pyproject.toml file."""
    try:
        table = (
            tomllib.loads(file.read_text(encoding="utf-8"))
            .get("tool", {})
            .get("amp-plugin", {})
            .get("check", {})
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{file}: {error}"
        raise ValueError(msg) from error
    for key, value in table.items():
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            msg = f"{file}: [tool.amp-plugin.check] has no {key!r}{hint}; it has {', '.join(_KEYS)}"
            raise ValueError(msg)
        is_right = isinstance(value, str) if key == "baseline" else _is_texts(value)
        if not is_right:
            wanted = "a path" if key == "baseline" else "a list of texts"
            msg = f"{file}: [tool.amp-plugin.check] {key} = {value!r} is not allowed; give {wanted}"
            raise ValueError(msg)
    return dict(table)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)
