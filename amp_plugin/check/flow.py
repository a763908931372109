"""Lists the calls in each function that involve losses, gradients or scalers, in source order.

A call such as ``scaler.step(optimizer)`` is an event of the function that contains it. Each event also holds
the conditions, loops and autocast regions around the call. Two calls in a loop can run in the same iteration
if the conditions around one call include the conditions around the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from amp_plugin.check.names import ROLES, FunctionNode, Key, Names, Scope, called, is_off

Kind = Literal[
    "scaled backward",
    "framework backward",
    "backward",
    "unscale",
    "scaler clip",
    "clip",
    "scaler step",
    "optimizer step",
    "update",
    "scheduler step",
    "unknown",
    "call",
]

_SCALER_METHODS: Final[dict[str, Kind]] = {
    "clip_and_step": "scaler clip",
    "clip_grad_norm_": "scaler clip",
    "clip_grad_value_": "scaler clip",
    "step": "scaler step",
    "unscale_": "unscale",
    "update": "update",
}
_INHERITED: Final = re.compile(r"scal|grad|amp|optim|step|backward|update|prepare|before|after|hook|clip")


@dataclass(frozen=True, slots=True)
class Region:
    """An autocast region in the source code that is checked.

    Attributes:
        device: the device type, such as "cuda", or "" if the source does not say.
        dtype: "float16" or "bfloat16", or "" if the source does not say.
        is_on: False if the region is created with ``enabled=False``.
        is_sure: True if the program opens this region in every branch of the code.
        when: pairs (condition, value), one for each condition in ``enabled=...``. If the region is on, the
            condition has this value.
    """

    device: str = ""
    dtype: str = ""
    is_on: bool = True
    is_sure: bool = True
    when: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Context:
    """The conditions, loops and autocast regions that surround a statement."""

    conditions: tuple[tuple[str, bool], ...] = ()
    loops: tuple[ast.AST, ...] = ()
    regions: tuple[Region, ...] = ()

    @property
    def region(self) -> Region | None:
        """The innermost autocast region, or None if no region is open or if that region is disabled."""
        inner = self.regions[-1] if self.regions else None
        if inner is None or not inner.is_on:
            return None
        return None if any((text, not holds) in self.conditions for text, holds in inner.when) else inner

    def within(self, test: ast.expr, *, holds: bool) -> Context:
        """Return the context inside one branch of ``if test``. ``holds`` is False for the ``else`` branch."""
        return replace(self, conditions=(*self.conditions, *facts(test, holds=holds)))

    def around(self, inner: Context) -> Context:
        """Add the context of a function call to the context of a statement in the called function.

        The context of the call is ``self``. The context of the call comes first in the result.

        Args:
            inner: The context of the statement within its own function.
        """
        return Context(
            (*self.conditions, *inner.conditions),
            (*self.loops, *inner.loops),
            (*self.regions, *inner.regions),
        )

    def excludes(self, other: Context) -> bool:
        """Return True if two statements are in opposite branches, so that only one of them can run."""
        return any((text, not holds) in other.conditions for text, holds in self.conditions)

    def goes_with(self, other: Context) -> bool:
        """Return True if one of two statements always runs when the other one does."""
        mine, its = {*self.conditions}, {*other.conditions}
        return not self.excludes(other) and (mine <= its or its <= mine)


@dataclass(frozen=True, eq=False)
class Event:
    """A call that may concern a loss, a gradient or a scaler.

    Attributes:
        kind: what the call does.
        call: the syntax node of the call.
        context: the conditions, loops and autocast regions around the call.
        scope: the scope of the function that contains the call.
        who: the scaler, accelerator or scheduler whose method is called. If an optimizer steps without a
            scaler, ``who`` is the optimizer.
        optimizer: the optimizer that is passed to the scaler's method.
        touches: the variables that are passed to the call, if the effect of the call is unknown. For a
            method call on ``self``, ``touches`` includes ``self`` if the method may use a scaler.
        position: the index of the event in its function.
    """

    kind: Kind
    call: ast.Call
    context: Context
    scope: Scope
    who: Key | None = None
    optimizer: Key | None = None
    touches: frozenset[Key] = frozenset()
    position: int = 0

    def may_change(self, key: Key | None) -> bool:
        """Return whether a variable, or the object that has it as an attribute, is passed to the call."""
        owner = Key(key.scope, re.split(r"[.\[]", key.text)[0]) if key else None
        return key in self.touches or owner in self.touches


@dataclass(eq=False)
class Flow:
    """The events of one function, or of the statements outside of all functions of a module.

    Attributes:
        scope: the scope of the function.
        events: the events, in source order.
        divisions: each division in the function, with the context around the division.
    """

    scope: Scope
    events: list[Event] = field(default_factory=list)
    divisions: list[tuple[ast.BinOp, Context]] = field(default_factory=list)

    def of(self, *kinds: Kind) -> list[Event]:
        """Return the events whose kind is one of ``kinds``."""
        return [event for event in self.events if event.kind in kinds]

    def between(self, first: Event, last: Event) -> list[Event]:
        """Return the events between two events, excluding both."""
        return self.events[first.position + 1 : last.position]


def facts(test: ast.expr, *, holds: bool) -> Iterator[tuple[str, bool]]:
    """Yield the conditions that hold inside a branch.

    The test ``x is not None`` is treated like the test ``x``.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from facts(test.operand, holds=not holds)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is holds:
        yield ast.unparse(test), holds
        for part in test.values:
            yield from facts(part, holds=holds)
    elif (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and _is_constant(test.comparators[0], None, True, False)
    ):
        value = test.comparators[0]
        same = isinstance(test.ops[0], (ast.Is, ast.Eq))
        if not same and not isinstance(test.ops[0], (ast.IsNot, ast.NotEq)):
            yield ast.unparse(test), holds
            return
        means = isinstance(value, ast.Constant) and bool(value.value)
        yield from facts(test.left, holds=holds if same is means else not holds)
    else:
        yield ast.unparse(test), holds


def _is_constant(node: ast.expr, *values: object) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is value for value in values)


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Return True if a block always ends in return, raise, continue or break."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise))


class _Walker:
    """Walks through a module's syntax tree and makes a Flow for each function."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.flows: list[Flow] = []
        self._parts: dict[FunctionNode, tuple[ast.AST, ...]] = {}  # all syntax nodes of each function
        # Maps each variable with a scaled loss to the scaler that scaled the loss.
        self._scaled: dict[Key, Key] = {}

    def function(self, node: ast.AST, body: Sequence[ast.stmt]) -> None:
        """Walk through a function and all functions that are defined inside it."""
        outside = getattr(self, "_flow", None)
        scope = self.names.scopes[node]
        self._flow = Flow(scope)
        self.flows.append(self._flow)
        regions = [self.region(d, scope) for d in getattr(node, "decorator_list", ())]
        self.body(body, Context(regions=tuple(filter(None, regions))))
        if outside is not None:
            self._flow = outside

    def body(self, statements: Sequence[ast.stmt], context: Context) -> None:
        for statement in statements:
            self.statement(statement, context)
            if isinstance(statement, ast.If):
                if _ends(statement.body):
                    context = context.within(statement.test, holds=False)
                elif _ends(statement.orelse):
                    context = context.within(statement.test, holds=True)

    def statement(self, node: ast.stmt, context: Context) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.function(node, node.body)
            case ast.ClassDef():
                self.body(node.body, Context())
            case ast.If():
                self.expression(node.test, context)
                self.body(node.body, context.within(node.test, holds=True))
                self.body(node.orelse, context.within(node.test, holds=False))
            case ast.For() | ast.AsyncFor() | ast.While():
                self.expression(node.test if isinstance(node, ast.While) else node.iter, context)
                self.body(node.body, replace(context, loops=(*context.loops, node)))
                self.body(node.orelse, context)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self.expression(item.context_expr, context)
                    if region := self.region(item.context_expr, self._flow.scope):
                        context = replace(context, regions=(*context.regions, region))
                self.body(node.body, context)
            case ast.Try() | ast.Match():
                self.alternatives(node, context)
            case _:
                self.remember(node)
                for child in ast.iter_child_nodes(node):
                    self.expression(child, context)

    def alternatives(self, node: ast.Try | ast.Match, context: Context) -> None:
        """Walk through the blocks of a ``try`` or ``match``.

        At most one handler or case of such a statement runs.
        """
        if isinstance(node, ast.Try):
            self.body(node.body, context)
            kind, blocks = "handler", [handler.body for handler in node.handlers]
            after = [*node.orelse, *node.finalbody]
        else:
            self.expression(node.subject, context)
            kind, blocks, after = "case", [case.body for case in node.cases], []
        for number, block in enumerate(blocks):
            name = f"{kind} {number} of line {node.lineno}"
            others = [
                (f"{kind} {other} of line {node.lineno}", False)
                for other in range(len(blocks))
                if other != number
            ]
            self.body(block, replace(context, conditions=(*context.conditions, (name, True), *others)))
        self.body(after, context)

    def remember(self, node: ast.stmt) -> None:
        """If a statement assigns a scaled loss to a variable, remember that variable."""
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return
        scope = self._flow.scope
        key = self.names.key(node.targets[0], scope)
        if key is None:
            return
        self._scaled.pop(key, None)
        if scaler := self.scaler_of(node.value, scope):
            self._scaled[key] = scaler

    def scaler_of(self, loss: ast.AST, scope: Scope) -> Key | None:
        """Return the scaler that scaled a loss, or None if the loss was not scaled."""
        if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
            if "scaler" in self.names.roles(loss.func.value, scope):
                return self.names.key(loss.func.value, scope)
            return None
        key = self.names.key(loss, scope)
        return self._scaled.get(key) if key else None

    def expression(self, node: ast.AST, context: Context) -> None:
        """Walk through an expression in the order in which Python evaluates it."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.IfExp):
            self.expression(node.test, context)
            self.expression(node.body, context.within(node.test, holds=True))
            self.expression(node.orelse, context.within(node.test, holds=False))
            return
        for child in ast.iter_child_nodes(node):
            self.expression(child, context)
        if isinstance(node, ast.Call):
            self._flow.events.append(self.event(node, context))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            self._flow.divisions.append((node, context))

    def region(self, node: ast.AST, scope: Scope) -> Region | None:
        """Return the autocast region that a context manager or decorator opens, or None."""
        values = [
            (value, where) for value, where in self.names.values(node, scope) if isinstance(value, ast.Call)
        ]
        found = [region for value, where in values if (region := self.region_made(value, where)) is not None]
        if not found:
            return None
        if len({replace(region, when=()) for region in found}) > 1:
            return Region(is_sure=False)
        return replace(found[0], is_sure=len(values) == 1, when=found[0].when if len(set(found)) == 1 else ())

    def region_made(self, value: ast.AST, scope: Scope) -> Region | None:
        """Return the autocast region that an expression creates, or None. Variables are not looked up."""
        if not isinstance(value, ast.Call):
            return None
        function = value.func
        framework = (
            function.value if isinstance(function, ast.Attribute) and function.attr == "autocast" else None
        )
        if framework is not None and {"accelerator", "fabric"} & self.names.roles(framework, scope):
            return Region()
        return region_of(self.names, value, scope)

    def event(self, call: ast.Call, context: Context) -> Event:
        """Return the event for a call."""
        scope, function = self._flow.scope, call.func
        known = Event("call", call, context, scope, position=len(self._flow.events))
        if isinstance(function, ast.Attribute):
            receiver, roles = function.value, self.names.roles(function.value, scope)
            who = self.names.key(receiver, scope)
            first = self.names.key(call.args[0], scope) if call.args else None
            if kind := self.kind(function.attr, call, receiver, roles):
                scaler = self.scaler_of(receiver, scope) if kind == "scaled backward" else who
                return replace(known, kind=kind, who=scaler, optimizer=first)
        if ROLES.get(self.names.dotted(call.func)) == "clip":
            return replace(known, kind="clip")
        passed = [*call.args, *(word.value for word in call.keywords)]
        if isinstance(function, ast.Attribute) and self.may_use_scaler(call, scope):
            passed.append(function.value)
        given = (self.names.key(value, scope) for value in passed)
        touches = frozenset(key for key in given if key is not None)
        return replace(known, kind="unknown" if touches else "call", touches=touches)

    def may_use_scaler(self, call: ast.Call, scope: Scope) -> bool:
        """Return whether a method call on ``self`` may use a scaler.

        Methods that are defined in this module are searched, together with the methods that they call. An
        inherited method is judged only by its name.
        """
        pending, seen = [(call, scope)], set[FunctionNode]()
        while pending:
            inner, where = pending.pop()
            name = self.own_method(inner, where)
            method = called(self.names, inner, where) if name else None
            if name and method is None and _INHERITED.search(name) and name != "zero_grad":
                return True
            if method is None or method in seen:
                continue
            seen.add(method)
            if method not in self._parts:
                self._parts[method] = tuple(ast.walk(method))
            parts = self._parts[method]
            if any(isinstance(part, ast.Attribute) and "scale" in part.attr.lower() for part in parts):
                return True
            pending.extend((p, self.names.scopes[method]) for p in parts if isinstance(p, ast.Call))
        return False

    def own_method(self, call: ast.Call, scope: Scope) -> str:
        """Return the name of a method that is called on ``self``, or "" for other calls."""
        function = call.func
        is_own = (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == scope.first_argument
            and self.names.key(function, scope) not in self.names.bound
        )
        return function.attr if is_own and isinstance(function, ast.Attribute) else ""

    def kind(self, method: str, call: ast.Call, receiver: ast.AST, roles: set[str]) -> Kind | None:
        """Infer the kind of a call from the method's name and the roles of the object it is called on."""
        if method in {"backward", "manual_backward"}:
            if self.scaler_of(receiver, self._flow.scope):
                return "scaled backward"
            if method == "manual_backward" or {"accelerator", "fabric"} & roles:
                return "framework backward"
            return None if call.args else "backward"
        if method == "step" and not ("scaler" in roles and call.args):
            for role, beginning in (("scheduler", "sch"), ("optimizer", "opt")):
                if role in roles or (not roles and is_named(receiver, beginning)):
                    return "scheduler step" if role == "scheduler" else "optimizer step"
            return None
        return _SCALER_METHODS.get(method) if "scaler" in roles else None


def is_named(node: ast.AST, beginning: str) -> bool:
    """Return whether the last part of a name begins with a prefix, as ``self.optimizer`` does with "opt"."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lower().lstrip("_").startswith(beginning) or f"_{beginning}" in name.lower()


def region_of(names: Names, call: ast.Call, scope: Scope) -> Region | None:
    """Return the autocast region that a call creates, or None."""
    dotted = names.dotted(call.func)
    if ROLES.get(dotted) != "autocast":
        return None
    words = {word.arg: word.value for word in call.keywords}
    if dotted.startswith(("torch.cuda.", "torch.cpu.")):
        device: object = dotted.split(".")[1]
        given = words.get("dtype") or (call.args[1] if len(call.args) > 1 else None)
    else:
        device = names.constant(words.get("device_type") or (call.args[0] if call.args else None), scope)
        given = words.get("dtype") or (call.args[1] if len(call.args) > 1 else None)
    device = device.partition(":")[0] if isinstance(device, str) else ""
    default = {"cuda": "float16", "cpu": "bfloat16"}.get(device, "")
    dtype = names.constant(given, scope) if given is not None else f"torch.{default}"
    dtype = str(dtype).replace("torch.half", "torch.float16").removeprefix("torch.")
    known = dtype if dtype in {"float16", "bfloat16", "float32"} else ""
    return Region(device, known, not is_off(call), when=_when(call, dotted))


def _when(call: ast.Call, dotted: str) -> tuple[tuple[str, bool], ...]:
    """Return the conditions in ``enabled=...`` that hold if a region is on."""
    given = [word.value for word in call.keywords if word.arg == "enabled"]
    if dotted.startswith(("torch.cuda.", "torch.cpu.")):
        given += call.args[:1]
    return tuple(facts(given[0], holds=True)) if given else ()


def flows_of(tree: ast.Module, names: Names) -> list[Flow]:
    """Return a Flow for the module-level statements, followed by a Flow for each function."""
    walker = _Walker(names)
    walker.function(tree, tree.body)
    return walker.flows
