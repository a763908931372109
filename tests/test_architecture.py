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


# -- this project -------------------------------------------------------------------------------


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


# -- the checks themselves ----------------------------------------------------------------------


def package_of(folder: Path, **sources: str) -> Path:
    """Write a package ``app``; ``a__b="..."`` is its module ``a/b.py``."""
    package = folder / "app"
    for name, source in {"__init__": "", **sources}.items():
        file = package / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


def test_a_long_function_is_found_and_its_docstring_is_not_counted(tmp_path: Path) -> None:
    package = package_of(
        tmp_path,
        short='def short():\n    """Say.\n\n    More.\n    """\n    return 1',
        long="class Owner:\n    def long(self):\n        a = 1\n        return a",
    )
    assert long_functions(package, most=2) == ["app/long.py:2 long has 3 lines"]
    assert long_functions(package, most=3) == []


@pytest.mark.parametrize(
    "source", ["for one in []: pass", "[each for each in []]", "it = 1", "a, thing = 1, 2"]
)
def test_a_name_that_says_nothing_is_found(source: str, tmp_path: Path) -> None:
    (found,) = vague_names(package_of(tmp_path, one=source))
    assert re.fullmatch(r"app/one\.py:1 calls a value '(one|each|it|thing)'", found)
