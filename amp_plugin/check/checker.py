"""Runs each rule on each file, and drops mistakes that are silenced by comments, settings or a baseline."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from amp_plugin.check import checkpoint_rules, name_rules, region_rules, scaler_rules
from amp_plugin.check.module import Hit, Module
from amp_plugin.check.settings import Settings
from amp_plugin.check.sources import Source
from amp_plugin.mistakes import MISTAKES, Mistake

_RULES: Final[dict[str, Callable[[Module], Iterator[Hit]]]] = {
    "AMP001": scaler_rules.clip_before_unscale,
    "AMP002": scaler_rules.step_past_scaler,
    "AMP003": scaler_rules.framework_bypassed,
    "AMP004": scaler_rules.no_update,
    "AMP005": scaler_rules.update_between_steps,
    "AMP006": scaler_rules.update_in_accumulation,
    "AMP007": scaler_rules.unscale_twice,
    "AMP008": region_rules.backward_in_autocast,
    "AMP009": region_rules.bce_in_autocast,
    "AMP010": region_rules.half_weights_trained,
    "AMP011": region_rules.fp16_without_scaler,
    "AMP012": region_rules.scaler_with_bf16,
    "AMP013": name_rules.deprecated_names,
    "AMP014": region_rules.constant_out_of_range,
    "AMP015": checkpoint_rules.scaler_not_saved,
    "AMP016": scaler_rules.scheduler_on_skip,
    "AMP017": region_rules.autocast_over_threads,
    "AMP018": region_rules.function_without_custom_fwd,
    "AMP019": region_rules.cuda_scaler_on_cpu,
}
_WORDS: Final = (
    "amp",
    "autocast",
    "GradScaler",
    "scaler",
    "accelerat",
    "fabric",
    "Fabric",
    "half(",
    "bfloat16",
    "float16",
)
_SKIPPED_FOLDERS: Final = {"node_modules", "site-packages", "venv", "__pycache__", "build", "dist"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A mistake in a file.

    Lines and columns are counted from 1. In a notebook, lines are counted from the beginning of the cell.

    Attributes:
        source: the file.
        code: the code of the rule, such as "AMP001".
        hit: what the rule has found.
    """

    source: Source
    code: str
    hit: Hit

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.source.path

    @property
    def cell(self) -> int:
        """The number of the notebook's code cell, counted from 1. It is 0 for a Python file."""
        return self.source.place(self.hit.node.lineno)[0]

    @property
    def line(self) -> int:
        """The first line."""
        return self.source.place(self.hit.node.lineno)[1]

    @property
    def column(self) -> int:
        """The first column."""
        return self.hit.node.col_offset + 1

    @property
    def end_line(self) -> int:
        """The last line."""
        return self.line + (self.hit.node.end_lineno or 0) - self.hit.node.lineno

    @property
    def end_column(self) -> int:
        """The column after the last one."""
        return (self.hit.node.end_col_offset or 0) + 1

    @property
    def mistake(self) -> Mistake:
        """The texts of the rule."""
        return MISTAKES[self.code]

    @property
    def text(self) -> str:
        """A string that says what is wrong and what to do."""
        if ";" in self.hit.detail:  # the detail includes the advice
            return self.hit.detail
        return f"{self.hit.detail or self.mistake.what}; {self.mistake.instead}"

    @property
    def known_by(self) -> tuple[str, str, str]:
        """The path, rule and text of the first line by which a baseline recognizes a mistake.

        The line number is not included, because edits elsewhere in the file change it.
        """
        text = self.source.lines[self.hit.node.lineno - 1].strip()
        return self.path.as_posix(), self.code, text


@dataclass(eq=False)
class Report:
    """The results of a check.

    Attributes:
        found: the mistakes, sorted by path and line.
        faults: maps each file that could not be checked to the reason.
        files: the number of files checked.
        fixed: the number of mistakes that were fixed.
        diffs: unified diffs of the edits that fix mistakes.
        written: the number of mistakes that were written to a baseline file, and the file, in words. It is
            empty if none was written.
    """

    found: list[Found] = field(default_factory=list)
    faults: dict[Path, str] = field(default_factory=dict)
    files: int = 0
    fixed: int = 0
    diffs: list[str] = field(default_factory=list)
    written: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code: 2 if a file could not be checked, 1 if a mistake was found, and 0 otherwise."""
        return 2 if self.faults else 1 if self.found else 0


def check(paths: Sequence[Path], settings: Settings, *, fix: bool = False, diff: bool = False) -> Report:
    """Check Python files and notebooks, including all those in folders.

    Args:
        paths: files and folders.
        settings: the rules to check, and the paths to leave out.
        fix: if True, fixable mistakes are corrected in the files.
        diff: if True, corrections are collected as diffs, and files do not change.
    """
    report = Report()
    file = settings.baseline
    baseline = Counter(read_baseline(file)) if file else Counter[tuple[str, str, str]]()
    for path in _files(paths, settings):
        report.files += 1
        try:
            source = Source.read(path)
            found = check_source(source, settings)
            found = _without_known(found, baseline, file.parent) if file else found
            edits = [edit for one in found for edit in one.hit.edits]
            if edits and diff:
                report.diffs.append(source.diff(source.edited(edits)))
            elif edits and fix:
                source.write(source.edited(edits))
                report.fixed += sum(bool(one.hit.edits) for one in found)
                found = [one for one in found if not one.hit.edits]
            report.found.extend(found)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            report.faults[path] = f"{type(error).__name__}: {error}"
    return report


def check_source(source: Source, settings: Settings) -> list[Found]:
    """Return the mistakes in one Python file or notebook, sorted by cell and line."""
    module = Module.read(source.text) if any(word in source.text for word in _WORDS) else None
    if module is None:
        compile(source.text, str(source.path), "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
        return []
    ignored = source.ignored()
    found: dict[tuple[int, int, int, str], Found] = {}
    for code, rule in _RULES.items():
        if not settings.wants(code):
            continue
        for hit in rule(module):
            if not _is_ignored(code, hit, ignored):
                one = Found(source=source, code=code, hit=hit)
                found[one.cell, one.line, one.column, code] = one
    return [one for _, one in sorted(found.items())]


def _is_ignored(code: str, hit: Hit, ignored: dict[int, set[str]]) -> bool:
    lines = (0, *range(hit.node.lineno, (hit.node.end_lineno or 0) + 1))
    return any({"", code} & ignored.get(line, set()) for line in lines)


def _files(paths: Sequence[Path], settings: Settings) -> Iterator[Path]:
    """Yield each file once. Hidden folders and folders of installed packages are left out."""
    seen: dict[str, Path] = {}
    for path in paths:
        inside = (file for pattern in ("*.py", "*.ipynb") for file in path.rglob(pattern))
        files = sorted(f for f in inside if not _is_skipped(f.relative_to(path))) if path.is_dir() else [path]
        for file in files:
            seen.setdefault(_relative(file, settings.root), file)
    for name, path in seen.items():
        names = {name, path.as_posix().removeprefix("./")}
        patterns = [p for given in settings.exclude for p in (given, f"{given.rstrip('/')}/*")]
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
            yield path


def _relative(path: Path, folder: Path) -> str:
    """Return a path relative to a folder."""
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive on Windows
        return path.as_posix()


def _is_skipped(path: Path) -> bool:
    return any(part in _SKIPPED_FOLDERS or part.startswith(".") for part in path.parts[:-1])


def _without_known(
    found: Iterable[Found], baseline: Counter[tuple[str, str, str]], folder: Path
) -> list[Found]:
    """Drop the mistakes that are listed in a baseline. Each of its entries drops one mistake."""
    new = []
    for one in found:
        entry = _entry(one, folder)
        if baseline[entry] > 0:
            baseline[entry] -= 1
        else:
            new.append(one)
    return new


def _entry(one: Found, folder: Path) -> tuple[str, str, str]:
    """Return the baseline entry of a mistake, with its path relative to ``folder``."""
    return _relative(one.path, folder), *one.known_by[1:]


def read_baseline(file: Path) -> list[tuple[str, str, str]]:
    """Return the entries of a baseline file. Each entry has a path, a rule code and the text of a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a baseline.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["findings"]
        return [(row["path"], row["code"], row["line"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{file} is not a baseline; write one with: amp-plugin check --write-baseline {file} PATH"
        raise ValueError(msg) from error


def write_baseline(file: Path, report: Report) -> Report:
    """Write the mistakes that a report lists to a baseline file, and return the report without them.

    Later checks that use this baseline report only new mistakes.
    """
    rows = [
        dict(zip(("path", "code", "line"), _entry(one, file.parent), strict=True)) for one in report.found
    ]
    file.write_text(json.dumps({"findings": rows}, indent=1) + "\n", encoding="utf-8")
    return replace(report, found=[], written=f"{len(rows)} written to {file}")
