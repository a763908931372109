"""Reads Python files and notebooks, finds comments that silence rules, and applies edits."""

from __future__ import annotations

import difflib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_plugin.check.module import Edit

_IGNORE = re.compile(r"#\s*amp:\s*(ignore-file|ignore)\s*(?:\[([^\]]*)\])?")
_MAGIC = re.compile(r"^(\s*)([%!?].*|.*\?)$|^(\s*[\w, ]+=\s*)[%!].*$")
_OTHER_LANGUAGE = re.compile(r"^%%(?!time|timeit|capture|prun)")


@dataclass(frozen=True)
class Source:
    """The Python source of a file. The source of a notebook consists of its code cells in order.

    Attributes:
        path: the path of the file.
        text: the text to parse. Lines with IPython syntax are replaced by plain Python.
        lines: the unchanged lines of the file.
        starts: the number (from 1) of the line at which each code cell of a notebook begins. It is empty for
            a Python file.
        encoding: the encoding of the file.
    """

    path: Path
    text: str
    lines: tuple[str, ...]
    starts: tuple[int, ...] = ()
    encoding: str = "utf-8"

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file.

        Raises:
            OSError: the file cannot be read.
            SyntaxError, ValueError: the file is not valid text in its encoding, or not a valid notebook.
        """
        content = path.read_bytes()
        if path.suffix == ".ipynb":
            return cls._notebook(path, content)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
        return cls(path, text, tuple(text.split("\n")), encoding=encoding)

    @classmethod
    def _notebook(cls, path: Path, content: bytes) -> Source:
        lines: list[str] = []
        parsed: list[str] = []
        starts: list[int] = []
        for cell in _code_cells(json.loads(content)):
            own = "".join(cell["source"]).split("\n")
            is_other = bool(_OTHER_LANGUAGE.match(own[0]))
            starts.append(len(lines) + 1)
            lines.extend(own)
            parsed.extend("" if is_other else _MAGIC.sub(_plain_python, line) for line in own)
        return cls(path, "\n".join(parsed), tuple(lines), tuple(starts))

    def place(self, line: int) -> tuple[int, int]:
        """Return the cell number of a line, and the line number within the cell.

        The cell of a Python file is 0.
        """
        cell = sum(start <= line for start in self.starts)
        return (cell, line - self.starts[cell - 1] + 1) if cell else (0, line)

    def edited(self, edits: Iterable[Edit]) -> tuple[str, ...]:
        """Return the lines after the edits. Edits never add or remove lines."""
        lines = [line.encode() for line in self.lines]
        for line, start, end, text in sorted({*edits}, reverse=True):
            old = lines[line - 1]
            lines[line - 1] = old[:start] + text.encode() + old[end:]
        return tuple(line.decode() for line in lines)

    def write(self, lines: tuple[str, ...]) -> None:
        """Write edited lines to the file."""
        if not self.starts:
            self.path.write_bytes("\n".join(lines).encode(self.encoding))
            return
        raw = self.path.read_text(encoding="utf-8")
        notebook = json.loads(raw)
        ends = (*(start - 1 for start in self.starts[1:]), len(lines))
        for cell, start, end in zip(_code_cells(notebook), self.starts, ends, strict=True):
            own = "\n".join(lines[start - 1 : end])
            cell["source"] = own if isinstance(cell["source"], str) else own.splitlines(keepends=True)
        indent = re.search(r"\n( +)", raw)
        text = json.dumps(notebook, ensure_ascii=False, indent=len(indent[1]) if indent else None)
        self.path.write_text(text + "\n" * raw.endswith("\n"), encoding="utf-8")

    def diff(self, lines: tuple[str, ...]) -> str:
        """Return the unified diff between this source and edited lines."""
        name = self.path.as_posix()
        return "".join(
            f"{line}\n" for line in difflib.unified_diff(self.lines, lines, name, name, lineterm="")
        )

    def ignored(self) -> dict[int, set[str]]:
        """Return a dict from each line number to the rule codes that a comment silences on that line.

        Line 0 stands for the whole file, and "" stands for all codes.
        """
        found: dict[int, set[str]] = {}
        for line, comment in self._comments() if "amp:" in self.text else ():
            if match := _IGNORE.search(comment):
                codes = {code.strip() for code in (match[2] or "").split(",")}
                found.setdefault(0 if match[1] == "ignore-file" else line, set()).update(codes)
        return found

    def _comments(self) -> Iterator[tuple[int, str]]:
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _code_cells(notebook: Any) -> list[Any]:
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        msg = "not a notebook of format 4"
        raise ValueError(msg)  # noqa: TRY004 - of the file, not of an argument
    return [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]


def _plain_python(match: re.Match[str]) -> str:
    return f"{match[3]}None" if match[3] else f"{match[1]}pass"
