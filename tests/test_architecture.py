"""What ruff and import-linter (pyproject.toml) do not look at: names, the length of functions, the folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

VAGUE = {"each", "it", "one", "thing"}


def long_functions(folder: Path, most: int) -> list[str]:
    """Describe the functions of more than ``most`` lines, docstrings not counted."""
    return [
        f"{place} {function.name} has {lines} lines"
        for place, function in _functions(folder)
        if (lines := _lines(function)) > most
    ]


def vague_names(folder: Path) -> list[str]:
    """Describe where a value is bound to a name that does not say what it is."""
    return [
        f"{file.relative_to(folder.parent)}:{node.lineno} calls a value {node.id!r}"
        for file, tree in _trees(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
    ]


def _trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(folder.rglob("*.py")):
        yield file, ast.parse(file.read_text(encoding="utf-8"))


def _functions(folder: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, tree in _trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(folder.parent)}:{node.lineno}", node


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    return _span(function) - (0 if docstring is None else _span(docstring))


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_the_design_document_has_the_same_folders() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert set(rows) == {file.parent.name for file in (ROOT / "amp_plugin").glob("*/__init__.py")}


def test_functions_are_short() -> None:
    found = long_functions(ROOT / "amp_plugin", most=40)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["amp_plugin", "benchmarks"])
def test_values_are_called_what_they_are(folder: str) -> None:
    found = vague_names(ROOT / folder)
    assert not found, "\n".join(found)
