"""The ``amp-plugin check`` rule about deprecated names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from amp_plugin.check.module import Edit, Hit, Module

_OLD: Final = re.compile(r"torch\.(cuda|cpu)\.amp(\.grad_scaler|\.autocast_mode)?$")
_MOVED: Final = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}
_NEW: Final = {"torch.amp", "torch.autocast", "torch.GradScaler"}
_ALTERNATIVES: Final = re.compile(r"version|hasattr|torch_|available", re.IGNORECASE)


def deprecated_names(module: Module) -> Iterator[Hit]:
    """AMP013: Find uses of torch.cuda.amp and torch.cpu.amp, and edits that replace them with torch.amp."""
    parents = module.parents
    lines = module.text.split("\n")
    imported: set[str] = set()
    for node in module.nodes:
        if not isinstance(node, ast.ImportFrom) or node.level or _is_alternative(node, parents):
            continue
        names = [alias.name for alias in node.names]
        if match := _OLD.match(node.module or ""):
            imported |= {alias.asname or alias.name for alias in node.names}
            uses = {alias.asname or alias.name: alias.name for alias in node.names}
            yield Hit(node, "", _moved(module, node, uses, match[1], parents, lines))
        elif node.module in {"torch.cuda", "torch.cpu"} and "amp" in names:
            local = next(alias.asname or "amp" for alias in node.names if alias.name == "amp")
            imported.add(local)
            device = str(node.module).partition(".")[2]
            edits = _moved(module, node, {local: ""}, device, parents, lines) if len(names) == 1 else ()
            yield Hit(node, "", edits)
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not isinstance(parents.get(node), ast.Attribute):
            yield from _attribute(module, node, imported, parents, lines)


def _attribute(
    module: Module, node: ast.Attribute, imported: set[str], parents: dict[ast.AST, ast.AST], lines: list[str]
) -> Iterator[Hit]:
    """Find deprecated names that are written in full, such as ``torch.cuda.amp.autocast()``."""
    inner = node.value
    root: ast.AST = node
    while isinstance(root, ast.Attribute):
        root = root.value
    match = _OLD.match(module.names.dotted(inner))
    if not match or (isinstance(root, ast.Name) and root.id in imported) or _is_alternative(node, parents):
        return
    is_plain = ast.unparse(inner).startswith("torch.") and inner.lineno == inner.end_lineno
    edits = _edits_of_use(node, node.attr, match[1], parents, lines) if is_plain else None
    if edits is None or node.attr not in _MOVED or inner.end_col_offset is None:
        yield Hit(node)
        return
    renamed = Edit(inner.lineno, inner.col_offset, inner.end_col_offset, "torch.amp")
    yield Hit(node, "", (renamed, *edits))


def _is_alternative(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a deprecated name is used only for torch releases that lack the new name."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.Try) and any(_names_torch_amp(part) for part in ast.walk(node)):
            return True
        if isinstance(node, (ast.If, ast.IfExp)) and _ALTERNATIVES.search(ast.unparse(node.test)):
            return True
    return False


def _names_torch_amp(node: ast.AST) -> bool:
    """Return whether a syntax node imports or uses a name of torch.amp."""
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return node.module == "torch.amp" or (
            node.module == "torch" and bool(names & {"amp", "autocast", "GradScaler"})
        )
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.amp") for alias in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in _NEW


def _moved(
    module: Module,
    node: ast.ImportFrom,
    uses: dict[str, str],
    device: str,
    parents: dict[ast.AST, ast.AST],
    lines: list[str],
) -> tuple[Edit, ...]:
    """Return the edits that rewrite an import and all uses of its names, or () if any use cannot be edited.

    Args:
        module: the module.
        node: the import.
        uses: maps each local name to its name in torch, or to "" for the module ``amp`` itself.
        device: "cuda" or "cpu".
        parents: maps each node to its parent.
        lines: the lines of the source.
    """
    line = lines[node.lineno - 1].encode()
    start = line.find(str(node.module).encode(), node.col_offset)
    is_tried = isinstance(parents.get(node), (ast.Try, ast.ExceptHandler))
    known = {name for name in uses.values() if name} <= _MOVED and node.names[0].name != "*"
    if start < 0 or is_tried or not known:
        return ()
    new = "torch" if "" in uses.values() else "torch.amp"
    edits = [Edit(node.lineno, start, start + len(str(node.module)), new)]
    for name in module.nodes:
        if not isinstance(name, ast.Name) or name.id not in uses:
            continue
        use: ast.AST = name
        torchs = uses[name.id]
        if not torchs:
            use = parents[name]
            torchs = use.attr if isinstance(use, ast.Attribute) else ""
        more = _edits_of_use(use, torchs, device, parents, lines)
        if more is None or torchs not in _MOVED:
            return ()
        edits.extend(more)
    return tuple(edits)


def _edits_of_use(
    node: ast.AST, name: str, device: str, parents: dict[ast.AST, ast.AST], lines: list[str]
) -> list[Edit] | None:
    """Return the edits that add a device argument where a deprecated name is used.

    Return None if the code cannot be edited automatically.
    """
    parent = parents.get(node)
    end_line, end = getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
    word = f'device_type="{device}"' if name.startswith("custom_") else f'"{device}"'
    if isinstance(parent, ast.Call) and parent.func is node:
        return _edits_of_call(parent, name, word, lines)
    if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and node in parent.decorator_list:
        return [Edit(end_line, end, end, f"({word})")] if name.startswith("custom_") else None
    return [] if name == "GradScaler" and not isinstance(parent, ast.keyword) else None


def _edits_of_call(call: ast.Call, name: str, word: str, lines: list[str]) -> list[Edit] | None:
    if any(isinstance(a, ast.Starred) for a in call.args) or (call.args and name.startswith("custom_")):
        return None
    line, column = call.func.end_lineno or 0, call.func.end_col_offset or 0
    rest = lines[line - 1].encode()[column:]
    if not rest.startswith(b"("):
        return None
    has_more = bool(call.args or call.keywords)
    separator = "" if not has_more else "," if rest[1:].strip() == b"" else ", "
    edits = [Edit(line, column + 1, column + 1, word + separator)]
    if name == "autocast":
        for position, argument in zip(("enabled", "dtype", "cache_enabled"), call.args, strict=False):
            edits.append(Edit(argument.lineno, argument.col_offset, argument.col_offset, f"{position}="))
    return edits
