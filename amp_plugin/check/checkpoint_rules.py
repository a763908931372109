"""The ``amp-plugin check`` rule about checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from amp_plugin.check.flow import Event, is_named
from amp_plugin.check.module import Hit, Module
from amp_plugin.check.names import FunctionNode, Scope, called

_GIVES_STATES: Final = re.compile(r"state|checkpoint|ckpt|snapshot", re.IGNORECASE)


def scaler_not_saved(module: Module) -> Iterator[Hit]:
    """AMP015: Find checkpoints that save the optimizer but not the scaler, in modules that use a scaler."""
    events = list(module.events())
    uses = any(e.kind == "scaler step" or "scaler" in module.names.made_by(e.call) for e in events)
    if not uses or re.search(r"scaler\w*(\[[^]]*\])?\.state_dict|amp\.state_dict", module.text):
        return
    states = [
        (e.call.func.value, e.scope)
        for e in events
        if isinstance(e.call.func, ast.Attribute) and e.call.func.attr == "state_dict"
    ]
    if any("scaler" in module.roles(owner, scope) for owner, scope in states):
        return
    reported: set[ast.AST] = set()
    for event in events:
        if not _saves(module, event.call) or _has_a_new_scaler(module, event):
            continue
        for part, value, scope in _saved(module, event):
            if _is_optimizer(module, part, scope) and value not in reported:
                reported.add(value)
                yield Hit(event.call)
                break
    yield from _returned_states(module, reported)


def _is_optimizer(module: Module, node: ast.AST, scope: Scope) -> bool:
    roles = module.roles(node, scope)
    return "optimizer" in roles or (not roles and is_named(node, "opt"))


def _has_a_new_scaler(module: Module, event: Event) -> bool:
    """Return True if every iteration of the loop around a save creates a new scaler."""
    makers = _makers(module)
    beside = (e for flow in module.flows if flow.scope is event.scope for e in flow.events)
    ran = {called(module.names, e.call, e.scope) for e in beside if e.context.loops}
    return bool(makers) and event.scope.node not in makers and makers <= ran


def _makers(module: Module) -> set[FunctionNode]:
    """Return the functions that create a scaler as a local variable, if no other code creates one."""
    makers: set[FunctionNode] = set()
    for event in module.events():
        if "scaler" not in module.names.made_by(event.call):
            continue
        statement: ast.AST = event.call
        while not isinstance(statement, ast.stmt):
            statement = module.parents[statement]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        own = [isinstance(t, ast.Name) and t.id in event.scope.locals for t in targets]
        function = event.scope.node
        if not own or not all(own) or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return set()
        makers.add(function)
    return makers


def _returned_states(module: Module, reported: set[ast.AST]) -> Iterator[Hit]:
    """Find functions that return the state of an optimizer together with other states, as a checkpoint."""
    for name, function in module.names.functions.items():
        if not _GIVES_STATES.search(name.rpartition(".")[2]):
            continue
        for returned in ast.walk(function):
            if not isinstance(returned, ast.Return) or returned.value is None:
                continue
            states = list(_states(module, returned.value, module.names.scopes[function]))
            optimizers = [state for state in states if _is_optimizer(module, state[0], state[2])]
            others = [s for s in states if s not in optimizers and not is_named(s[0], "sch")]
            if optimizers and others and optimizers[0][1] not in reported:
                yield Hit(optimizers[0][0])


def _saves(module: Module, call: ast.Call) -> bool:
    """Return whether a call saves objects, and none of them is a scaler.

    The called function is ``torch.save`` or another imported function whose name contains ``save``.
    """
    function = call.func
    name = module.names.dotted(function).rpartition(".")[2]
    if not name and isinstance(function, ast.Name) and function.id not in module.names.functions:
        name = function.id
    passed = [*call.args, *(word.value for word in call.keywords)]
    is_open = any(isinstance(value, ast.Starred) for value in call.args) or any(
        word.arg is None for word in call.keywords
    )
    return "save" in name and not is_open and not any("scaler" in ast.unparse(value) for value in passed)


def _saved(module: Module, event: Event) -> Iterator[tuple[ast.expr, ast.AST, Scope]]:
    """Yield each object whose state a call saves, with the expression and scope in which it was found.

    With a save function other than ``torch.save``, a program may pass an object itself, not its state.
    """
    is_torchs = module.names.dotted(event.call.func) == "torch.save"
    passed = [*event.call.args, *(word.value for word in event.call.keywords)]
    for argument in passed[:1] if is_torchs else passed:
        if not is_torchs and isinstance(argument, (ast.Name, ast.Attribute)):
            yield argument, event.call, event.scope
        yield from _states(module, argument, event.scope)


def _states(module: Module, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr, ast.AST, Scope]]:
    """Yield each object whose ``state_dict()`` appears in an expression, with that expression and its scope.

    If the expression is a variable, values that are assigned to its keys are searched too. An example of this
    assignment is ``checkpoint["model"] = model.state_dict()``.
    """
    bound = module.names.bound
    for value, where in module.names.values(node, scope):
        for owner in _owners(value):
            yield owner, value, where
        for part in value.values if isinstance(value, ast.Dict) else ():
            for made, inside in module.names.values(part, where) if isinstance(part, ast.Name) else ():
                for owner in _owners(made):
                    yield owner, value, inside
        key = module.names.key(value, where)
        items = [k for k in bound if key and k.scope == key.scope and k.text.startswith(f"{key.text}[")]
        for item, inner in (pair for key in items for pair in bound[key]):
            for owner in _owners(item):
                yield owner, item, inner


def _owners(node: ast.AST) -> Iterator[ast.expr]:
    """Yield each object on which an expression calls ``state_dict()``."""
    for part in ast.walk(node):
        function = part.func if isinstance(part, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "state_dict":
            yield function.value
