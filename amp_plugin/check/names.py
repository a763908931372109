"""Resolves the imported names and the variables of a module."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

ROLES: Final = {
    **dict.fromkeys(
        (
            *("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"),
            *("torch.cuda.amp.autocast", "torch.cuda.amp.autocast_mode.autocast"),
            *("torch.cpu.amp.autocast", "amp_plugin.autocast"),
        ),
        "autocast",
    ),
    **dict.fromkeys(
        (
            *("torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"),
            *("torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"),
            *("torch.cpu.amp.GradScaler", "torch.GradScaler", "amp_plugin.GradScaler"),
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        ),
        "scaler",
    ),
    **dict.fromkeys(("accelerate.Accelerator", "amp_plugin.AmpAccelerator"), "accelerator"),
    **dict.fromkeys(("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"), "fabric"),
    "torch.nn.BCELoss": "bce",
    "torch.nn.functional.binary_cross_entropy": "bce function",
    "torch.nn.DataParallel": "data parallel",
    "torch.nn.parallel.DataParallel": "data parallel",
    **dict.fromkeys(
        (
            f"torch.nn.utils.{module}{name}"
            for module in ("", "clip_grad.")
            for name in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
        ),
        "clip",
    ),
}
"""Maps full names of torch and of frameworks to their roles."""

_PASSED_THROUGH: Final = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "prepare",
    "setup",
    "compile",
    "half",
    "bfloat16",
}

# Limits of a variable lookup: the depth of the search, and the number of values.
_DEPTH, _MOST = 4, 200


class Key(NamedTuple):
    """A variable. ``text`` is its source text, such as ``self.scaler``, and ``scope`` names its scope."""

    scope: str
    text: str


@dataclass(frozen=True, eq=False)
class Scope:
    """The scope of a module, class or function. ``parent`` is the enclosing scope."""

    name: str
    node: ast.AST
    parent: Scope | None
    locals: frozenset[str] = frozenset()
    # The name of the first argument of a method, such as self.
    first_argument: str = ""

    def of(self, root: str) -> str:
        """Return the name of the scope in which a variable is defined."""
        scope: Scope | None = self
        while scope is not None and scope.parent is not None:
            if root == scope.first_argument:
                return scope.parent.name
            if root in scope.locals:
                return scope.name
            scope = scope.parent
        return ""

    def owner(self) -> Scope | None:
        """Return the scope of the innermost class around this scope, or None."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope


@dataclass(eq=False)
class Names:
    """The imports, variables, functions and classes of one module."""

    imports: dict[str, str] = field(default_factory=dict)
    bound: dict[Key, list[tuple[ast.expr, Scope]]] = field(default_factory=lambda: defaultdict(list))
    inferred: dict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    functions: dict[str, FunctionNode] = field(default_factory=dict)  # "train", "Trainer.step"
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)  # of modules, classes and functions

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of an imported object, such as ``torch.amp.GradScaler``, or ""."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        return ".".join([self.imports[node.id], *reversed(parts)])

    def key(self, node: ast.AST, scope: Scope) -> Key | None:
        """Return the variable that an expression refers to, or None."""
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if not isinstance(root, ast.Name):
            return None
        return Key(scope.of(root.id), ast.unparse(node))

    def values(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield all expressions that may be the source of an expression's value.

        The search follows variables, both sides of ``a if b else c`` and ``a or b``, and methods that return
        the object itself, such as ``model.to(device)``.
        """
        pending, seen = [(node, scope, 0)], {node}
        while pending:
            node, scope, depth = pending.pop()
            branches: list[ast.expr] = []
            if isinstance(node, ast.IfExp):
                branches = [node.body, node.orelse]
            elif isinstance(node, ast.BoolOp):
                branches = node.values
            else:
                yield node, scope
            found = [(branch, scope) for branch in branches] or (
                self._sources(node, scope) if depth < _DEPTH else ()
            )
            for value, where in found:
                if value not in seen and len(seen) < _MOST:
                    seen.add(value)
                    pending.append((value, where, depth + (not branches)))

    def _sources(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield the expressions from which ``node`` may get its value directly."""
        function = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(node, ast.Call)
            and isinstance(function, ast.Attribute)
            and function.attr in _PASSED_THROUGH
        ):
            if not self.dotted(function) and function.attr not in {"prepare", "setup"}:
                yield function.value, scope
            for argument in node.args:
                yield argument, scope
        if isinstance(function, ast.Name) and function.id in self.functions:
            yield from self._returned(self.functions[function.id])
        key = self.key(node, scope)
        yield from self.bound.get(key, ()) if key else ()

    def _returned(self, function: FunctionNode) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield the expressions that a function in this module returns."""
        for part in ast.walk(function):
            if isinstance(part, ast.Return) and part.value is not None:
                yield part.value, self.scopes[function]

    def roles(self, node: ast.AST, scope: Scope) -> set[str]:
        """Return the roles that an expression may have, such as "scaler", "optimizer" or "accelerator"."""
        found: set[str] = set()
        for value, where in self.values(node, scope):
            key = self.key(value, where)
            found |= self.inferred.get(key, set()) if key else set()
            if isinstance(value, ast.Call):
                found |= self.made_by(value)
        made_on = "enabled scaler" in found
        return (
            found
            - {"disabled scaler", "enabled scaler"}
            - ({"scaler"} if "disabled scaler" in found and not made_on else set())
        )

    def made_by(self, call: ast.Call) -> set[str]:
        """Return labels for the object that a call creates, such as ``"optimizer"`` or ``"scaler"``."""
        dotted = self.dotted(call.func)
        if role := ROLES.get(dotted):
            return (
                {role, f"{'disabled' if is_off(call) else 'enabled'} scaler"} if role == "scaler" else {role}
            )
        last = dotted.rpartition(".")[2]
        if dotted.startswith("torch.optim.lr_scheduler.") or "schedule" in last.lower():
            return {"scheduler"}
        if dotted.startswith("torch.optim.") and last[:1].isupper():
            return {"optimizer"}
        if isinstance(call.func, ast.Name) and call.func.id in self.classes:
            return {f"instance of {call.func.id}"}
        return set()

    def constant(self, node: ast.AST | None, scope: Scope) -> object:
        """Return the constant or dotted name that an expression always evaluates to, or None."""
        if node is None:
            return None
        found: set[object] = set()
        for value, _ in self.values(node, scope):
            if isinstance(value, ast.Constant):
                found.add(value.value)
            elif dotted := self.dotted(value):
                found.add(dotted)
            elif not isinstance(value, (ast.Name, ast.Attribute)) or self.key(value, scope) not in self.bound:
                return None
        return found.pop() if len(found) == 1 else None


def is_off(call: ast.Call) -> bool:
    """Return whether a call passes ``enabled=False``."""
    return any(
        word.arg == "enabled" and isinstance(word.value, ast.Constant) and word.value.value is False
        for word in call.keywords
    )


def _targets(node: ast.AST) -> Iterator[str]:
    """Yield the names that a function assigns, which are its local variables."""
    declared = {
        name for part in ast.walk(node) if isinstance(part, (ast.Global, ast.Nonlocal)) for name in part.names
    }
    pending = list(ast.iter_child_nodes(node))
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield part.name
            continue
        if isinstance(part, ast.Lambda):
            continue
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id not in declared:
            yield part.id
        pending.extend(ast.iter_child_nodes(part))


class _Collector(ast.NodeVisitor):
    """Fills a ``Names`` from a module."""

    def __init__(self, tree: ast.Module) -> None:
        self.names = Names()
        self.calls: list[tuple[ast.Call, Scope]] = []
        self._scope = Scope("", tree, None)
        self.names.scopes[tree] = self._scope
        self.visit(tree)

    def _import(self, node: ast.Import | ast.ImportFrom, local: str, name: str) -> None:
        """Record an import. The first import of a name wins, unless a later import is unconditional."""
        around = self._scope.node
        if isinstance(around, ast.Module) and node in around.body:  # the import is unconditional
            self.names.imports[local] = name
        self.names.imports.setdefault(local, name)

    def visit_Import(self, node: ast.Import) -> None:
        """Record the local names of imported modules."""
        for alias in node.names:
            local = alias.asname or alias.name.partition(".")[0]
            self._import(node, local, alias.name if alias.asname else local)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Record the local names of imported objects. ``*`` stands for all names in ROLES."""
        if node.level or not node.module:
            return
        for alias in node.names:
            if alias.name == "*":
                known = (name.rpartition(".") for name in ROLES)
                self.names.imports.update({n: f"{m}.{n}" for m, _, n in known if m == node.module})
            else:
                self._import(node, alias.asname or alias.name, f"{node.module}.{alias.name}")

    def _enter(self, node: FunctionNode | ast.ClassDef, scope: Scope) -> None:
        outside, self._scope = self._scope, scope
        self.names.scopes[node] = scope
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self._scope = outside

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Record a class."""
        self.names.classes.setdefault(node.name, node)
        bases = (base.id for base in node.bases if isinstance(base, ast.Name))
        base = next((name for name in bases if name in self.names.classes), "")
        shared = self.names.scopes[self.names.classes[base]].name if base and base != node.name else ""
        self._enter(node, Scope(shared or f"{self._scope.name}.{node.name}", node, self._scope))

    def visit_FunctionDef(self, node: FunctionNode) -> None:
        """Record a function and its local variables."""
        in_class = isinstance(self._scope.node, ast.ClassDef)
        owner = f"{self._scope.node.name}." if isinstance(self._scope.node, ast.ClassDef) else ""
        self.names.functions.setdefault(f"{owner}{node.name}", node)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = frozenset([*(argument.arg for argument in arguments), *_targets(node)])
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        first = arguments[0].arg if in_class and arguments and not static else ""
        self._enter(node, Scope(f"{self._scope.name}.{node.name}", node, self._scope, own, first))

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Record a function and its local variables."""
        self.visit_FunctionDef(node)

    def _bind(self, target: ast.AST, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                values = value.args if value.func.attr in {"prepare", "setup"} else []
            if len(values) == len(target.elts):
                for part, given in zip(target.elts, values, strict=True):
                    self._bind(part, given)
        elif key := self.names.key(target, self._scope):
            self.names.bound[key].append((value, self._scope))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record the value that a variable gets."""
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Record the value that a variable gets."""
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Record the values of a loop variable, as in ``for optimizer in (first, second)``."""
        for value in node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else ():
            self._bind(node.target, value)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        """Record the variable after ``as``."""
        if node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Record a call."""
        self.calls.append((node, self._scope))
        self.generic_visit(node)


def names_of(tree: ast.Module) -> Names:
    """Return the resolved names of a module."""
    collector = _Collector(tree)
    names = collector.names
    for call, scope in collector.calls:
        _bind_arguments(names, call, scope)
        _infer(names, call, scope)
    # A second pass is needed, because a later call may show that a variable is a scaler.
    for call, scope in collector.calls:
        _infer(names, call, scope)
    return names


def called(names: Names, call: ast.Call, scope: Scope) -> FunctionNode | None:
    """Return the function or method that a call runs, or None if this module does not define it.

    Calling an instance of a class runs the method ``forward`` of that class.
    """
    function = call.func
    if isinstance(function, ast.Name) and function.id in names.functions:
        return names.functions[function.id]
    owner = scope.owner()
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and owner is not None:
        method = f"{owner.node.name}.{function.attr}" if isinstance(owner.node, ast.ClassDef) else ""
        if function.value.id == scope.first_argument and method in names.functions:
            return names.functions[method]
    for role in names.roles(function, scope):
        kind = role.removeprefix("instance of ")
        if kind != role and f"{kind}.forward" in names.functions:
            return names.functions[f"{kind}.forward"]
    return None


def _bind_arguments(names: Names, call: ast.Call, scope: Scope) -> None:
    """Bind the arguments of a function in this module to the values that a call passes."""
    function = called(names, call, scope)
    if function is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    inside = names.scopes[function]
    given = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    given = given[bool(inside.first_argument) :]
    pairs = [*zip(given, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
    for name, value in pairs:
        if name and name in inside.locals:
            names.bound[Key(inside.name, name)].append((value, scope))


def _infer(names: Names, call: ast.Call, scope: Scope) -> None:
    """Infer from a method call that a variable is a scaler or an optimizer."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return
    receiver = function.value
    if function.attr == "backward" and isinstance(receiver, ast.Call):
        scale = receiver.func
        if isinstance(scale, ast.Attribute) and scale.attr == "scale":
            _is(names, scale.value, scope, "scaler")
    if function.attr == "unscale_" and len(call.args) == 1:
        _is(names, receiver, scope, "scaler")
    if function.attr in {"step", "unscale_"} and call.args and "scaler" in names.roles(receiver, scope):
        _is(names, call.args[0], scope, "optimizer")


def _is(names: Names, node: ast.AST, scope: Scope, role: str) -> None:
    key = names.key(node, scope)
    if key is not None:
        names.inferred[key].add(role)
