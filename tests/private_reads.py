"""Reads of private names across the files of a package, found in its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

OWN_OBJECTS = {"self", "cls"}
READ_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def private_reads(package: Path, *folders: str) -> list[str]:
    """Describe where a module takes a private name from another module of its package.

    That is ``x._name`` or ``getattr(x, "_name")``, where a class of another module defines ``_name``, and
    ``from other import _name``. Not meant are reads on self, cls and super(), names that the reading module defines
    too, and names that only torch or a framework defines.

    Args:
        package: its folder.
        *folders: the folders in it whose modules are looked at; none: all.

    Returns:
        One line a read, with the modules that define the name.
    """
    trees = {
        file.relative_to(package.parent): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }
    of_classes = {file: {*_names_of_classes(tree)} for file, tree in trees.items()}
    lines = []
    for file, tree in trees.items():
        if folders and file.parts[1] not in folders:
            continue
        own = of_classes[file] | {*_bound_by(tree)}
        for line, name in sorted({*_attributes_read(tree)}):
            owners = [str(other) for other, names in of_classes.items() if name in names - own]
            if owners:
                lines.append(f"{file}:{line} reads {name} of {', '.join(owners)}")
        lines += [f"{file}:{line} imports {name}" for line, name in _imported(tree, package.name)]
    return lines


def _is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_own(value: ast.expr) -> bool:
    """Whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in OWN_OBJECTS


def _names_of_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that classes set on self and cls or bind in their bodies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield from filter(_is_private, [node.attr])
        elif isinstance(node, ast.ClassDef):
            yield from _bound_by(node)


def _bound_by(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the private names that a module or class body binds, with its slots."""
    for statement in scope.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            nodes = [*ast.walk(statement)]
            names = [
                node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
            if names == ["__slots__"]:
                names = [node.value for node in nodes if _is_text(node)]
        else:
            continue
        yield from filter(_is_private, names)


def _attributes_read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute that is not of self, cls or super()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READ_BY_NAME:
            others = [] if not node.args or _is_own(node.args[0]) else node.args[1:2]
            names = [argument.value for argument in others if _is_text(argument)]
        else:
            continue
        yield from ((node.lineno, name) for name in filter(_is_private, names))


def _imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name imported from within the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == package):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))
