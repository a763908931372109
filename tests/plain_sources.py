"""What makes a function hard to read, found in sources: its length, and names that say nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
