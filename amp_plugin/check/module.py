"""A parsed Python module with its syntax tree, its names, and the calls that concern losses and scalers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from amp_plugin.check.flow import Context, Event, Flow, Region, flows_of
from amp_plugin.check.names import FunctionNode, Names, Scope, called, names_of


class Edit(NamedTuple):
    """An edit that replaces part of a line with new text. If the part is empty, the edit inserts the text."""

    line: int  # from 1
    # Columns are counted in bytes of UTF-8, as in ``ast``.
    start: int
    end: int
    text: str


class Hit(NamedTuple):
    """A mistake that a rule has found, with its place in the syntax tree."""

    node: ast.expr | ast.stmt
    detail: str = ""  # a text in place of the rule's
    edits: tuple[Edit, ...] = ()  # edits that fix the mistake


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed module."""

    tree: ast.Module
    text: str
    names: Names
    flows: list[Flow]

    @classmethod
    def read(cls, text: str) -> Module:
        """Parse the source of a module. Raise SyntaxError if the source cannot be parsed."""
        tree = ast.parse(text)
        names = names_of(tree)
        return cls(tree, text, names, flows_of(tree, names))

    def events(self) -> Iterator[Event]:
        """Yield the calls in the module that may concern a loss, a gradient or a scaler."""
        for flow in self.flows:
            yield from flow.events

    @cached_property
    def regions(self) -> list[Region]:
        """All autocast regions that the module opens, except disabled ones."""
        found = {region: None for event in self.events() for region in event.context.regions if region.is_on}
        return list(found)

    @cached_property
    def covered(self) -> dict[FunctionNode, Region]:
        """Maps each function of this module that is called inside an autocast region to that region."""
        found: dict[FunctionNode, Region] = {}
        pending = [(event.call, event.scope, event.context.region) for event in self.events()]
        calls: dict[FunctionNode, list[Event]] = {}
        for flow in self.flows:
            if isinstance(flow.scope.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                calls[flow.scope.node] = flow.events
        while pending:
            call, scope, region = pending.pop()
            function = called(self.names, call, scope) if region is not None else None
            if function is None or region is None or function in found:
                continue
            found[function] = region
            inner = (e for e in calls.get(function, ()) if not e.context.regions)
            pending.extend((event.call, event.scope, region) for event in inner)
        return found

    def steps(self, flow: Flow, depth: int = 3) -> list[Event]:
        """Return the steps of scalers and schedulers in a function and in the functions that it calls.

        Calls to functions in the module are followed up to ``depth`` levels. The conditions and loops around
        a call also apply to the steps inside the called function.
        """
        steps = flow.of("scaler step", "scheduler step")
        if not depth or not self._has_both_steps:
            return steps
        known = self._known_steps.get((flow, depth))
        if known is not None:
            return known
        found = self._known_steps[flow, depth] = list[Event]()
        for event in flow.events:
            function = called(self.names, event.call, event.scope) if event not in steps else None
            inner = self._flow_of.get(function) if function else None
            for step in self.steps(inner, depth - 1) if inner else ():
                found.append(replace(step, context=event.context.around(step.context)))
            if event in steps:
                found.append(event)
        return found

    @cached_property
    def _has_both_steps(self) -> bool:
        return {"scaler step", "scheduler step"} <= {event.kind for event in self.events()}

    @cached_property
    def _known_steps(self) -> dict[tuple[Flow, int], list[Event]]:
        return {}

    @cached_property
    def _flow_of(self) -> dict[ast.AST, Flow]:
        return {flow.scope.node: flow for flow in self.flows}

    def region_around(self, context: Context, scope: Scope) -> Region | None:
        """Return the autocast region around a statement.

        If the function that contains the statement opens no region around the statement, return the region
        around a call to the function.
        """
        node = scope.node
        if context.regions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return context.region
        return self.covered.get(node)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the syntax tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Maps each syntax node to its parent node."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def identifiers(self) -> str:
        """All names that the module uses, separated by spaces. Names in comments and strings are left out."""
        found: set[str] = set()
        for node in self.nodes:
            for name in ("id", "attr", "arg", "name", "module"):
                if isinstance(value := getattr(node, name, None), str):
                    found.add(value)
        return " ".join(sorted(found))

    def roles(self, node: ast.AST, scope: Scope) -> set[str]:
        """Return the roles that an expression may have, such as "scaler" or "optimizer"."""
        return self.names.roles(node, scope)
