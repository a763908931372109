"""The imports between the modules of a package, read from its sources."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Graph = dict[str, set[str]]  # module -> the modules it imports; dotted names


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One module imports another.

    Attributes:
        importer, imported: dotted names.
        place: file and line of the statement, for messages.
    """

    importer: str
    imported: str
    place: str

    def __str__(self) -> str:
        return f"{self.place} imports {self.imported}"


def modules_of(package: Path) -> dict[str, Path]:
    """Return dotted name -> file of each module of a package; folders without ``.__init__``."""
    files = sorted(package.rglob("*.py"))
    return {_dotted(file.relative_to(package.parent)): file for file in files}


def _dotted(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imports_of(package: Path) -> list[Import]:
    """Return the imports in all modules of a package.

    Those inside functions and under ``TYPE_CHECKING`` count. ``from a import b`` imports the module ``a.b`` if there
    is one, otherwise ``a``. That Python runs the ``__init__`` of each parent first does not count.

    Args:
        package: its folder.
    """
    modules = modules_of(package)
    return [
        Import(importer=name, imported=imported, place=f"{file.relative_to(package.parent)}:{line}")
        for name, file in modules.items()
        for line, imported in _imported_by(name, file, modules)
        if imported != name
    ]


def _imported_by(name: str, file: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    parents = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                member = f"{source}.{alias.name}"
                yield node.lineno, member if member in modules else source


def circles(imports: Sequence[Import]) -> list[str]:
    """Describe each group of modules that import one another, directly or not.

    Args:
        imports: as ``imports_of`` returns them.

    Returns:
        One line a group: its modules, and the shortest circle among them.
    """
    graph: Graph = {}
    for found in imports:
        graph.setdefault(found.importer, set()).add(found.imported)
    lines = []
    for group in _groups(graph):
        shortest = min((_way_back(module, graph) for module in group), key=len)
        lines.append(f"{len(group)} modules in a circle: {', '.join(group)}; {' -> '.join(shortest)}")
    return lines


def _groups(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of two modules and more."""
    reached = {module: _reached_from(module, graph) for module in graph}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in graph
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reached_from(start: str, graph: Graph) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def _way_back(start: str, graph: Graph) -> list[str]:
    """Return the shortest way from a module to itself, by breadth-first search."""
    ways = deque([[start]])
    seen: set[str] = set()
    while ways:
        way = ways.popleft()
        for following in sorted(graph.get(way[-1], set()) - seen):
            if following == start:
                return [*way, start]
            seen.add(following)
            ways.append([*way, following])
    msg = f"{start} is in no circle"
    raise ValueError(msg)
