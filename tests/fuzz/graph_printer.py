"""Print a random graph as a program over the names of :mod:`tests.fuzz.two_sides`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.graphs import COUNTED, MATRICES, OPS, Node

HEADER = """\
torch.manual_seed(0)
x0 = torch.randn(4, 8, requires_grad=True)
x1 = torch.randn(4, 8)
w0, w1, w2, w3 = (torch.nn.Parameter(torch.randn(8, 8) / 3) for _ in range(4))
b0, s0 = torch.nn.Parameter(torch.randn(8) / 3), torch.nn.Parameter(torch.ones(8))
k0 = torch.nn.Parameter(torch.randn(4, 4, 3) / 3)
c0 = torch.randn(8, 8) / 3
Product = product_of(side)"""


@dataclass
class _Outermost:
    dtypes: dict[str, str] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)


class Printer:
    """Prints a graph as a program over the names of :mod:`tests.fuzz.two_sides`.

    What torch.autocast cannot be asked is left out: a leaf cast to two dtypes in one region (torch
    keeps the first), and uses of a leaf on both sides of a write of a weight (to make torch see the
    write, all its casts are dropped). So is what docs/autocast.md says to differ: regions in the function
    of a reentrant checkpoint.
    """

    def __init__(self) -> None:
        self.lines = HEADER.split("\n")
        self._indent = ""
        self._values = ["x0", "x1"]
        self._count = 0
        self._dtypes: list[str | None] = [None]  # of the open regions; None where autocast is off
        self._outermost = _Outermost()
        self._in_function = self._in_checkpoint = self._in_inference = self._has_checkpoint = False
        self._in_reentrant = False

    def print(self, nodes: tuple[Node, ...]) -> str:
        self._all(nodes)
        self._backward()
        return "\n".join(self.lines)

    def _all(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            getattr(self, f"_{node.kind}")(*node.args, *((node.body,) if node.body else ()))

    def _line(self, text: str) -> None:
        self.lines.append(self._indent + text)

    def _new(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _inside(self, opening: str, nodes: tuple[Node, ...]) -> None:
        self._line(opening)
        self._indent += "    "
        before = len(self.lines)
        self._all(nodes)
        if len(self.lines) == before:
            self._line("pass")
        self._indent = self._indent[:-4]

    @property
    def _on(self) -> str | None:
        return self._dtypes[-1]

    # -- statements -----------------------------------------------------------------------------

    def _op(self, name: str, *numbers: int) -> None:
        template = OPS[name]
        weights = self._weights(numbers[2:])
        if ("{w}" in template or "k0" in template or "b0" in template) and weights is None:
            return
        a = self._values[numbers[0] % len(self._values)]
        others = [value for value in self._values if value != a]
        if not others:
            return
        b = others[numbers[1] % len(others)]
        m, n = (a, b) if self._on else (f"{a}.float()", f"{b}.float()")
        w, u = weights or ("", "")
        leaves = {*_named_in(template, w, u), *(value for value in (a, b) if value[0] in "xa")}
        if leaves & self._outermost.banned:
            return
        if self._on:
            if any(self._outermost.dtypes.get(leaf, self._on) != self._on for leaf in leaves):
                return
            self._outermost.dtypes.update(dict.fromkeys(leaves, self._on))
        value = self._new()
        self._line(f"{value} = " + template.format(a=a, b=b, m=m, n=n, w=w, u=u))
        if not self._in_inference:
            self._values.append(value)

    def _weights(self, numbers: tuple[int, ...]) -> tuple[str, str] | None:
        known = self._outermost
        free = [
            w for w in MATRICES if w not in known.banned and known.dtypes.get(w, self._on) in (self._on, None)
        ]
        if not self._on:
            free = [w for w in MATRICES if w not in known.banned]
        if len(free) < 2:
            return None
        w = free.pop(numbers[0] % len(free))
        return w, free[numbers[1] % len(free)]

    def _region(self, dtype: str, enabled: bool, cached: bool, form: str, body: Any = ()) -> None:
        if self._in_reentrant:
            self._all(body)
            return
        options = "".join(
            f", {name}={value}"
            for name, value, default in (
                ("enabled", enabled, True),
                ("cache_enabled", cached, True),
            )
            if value != default
        )
        call = f'side.autocast("{dtype}"{options})'
        self._dtypes.append(dtype if enabled else None)
        if form == "with":
            self._inside(f"with {call}:", body)
        else:
            self._function(body, call)
        self._dtypes.pop()
        if len(self._dtypes) == 1:
            self._outermost = _Outermost()

    def _function(self, body: tuple[Node, ...], decorator: str) -> None:
        """A region as a decorator, of a function of one value."""
        given, name, argument = self._values[-1], self._new("f"), self._new("a")
        self._line(f"@{decorator}")
        self._nested(name, argument, body)
        value = self._new()
        self._line(f"{value} = {name}({given} * 1.0)")
        if not self._in_inference:
            self._values.append(value)

    def _nested(self, name: str, argument: str, body: tuple[Node, ...]) -> None:
        outer, self._values = (self._values, self._in_function), [argument, "x1"]
        self._in_function = True
        self._inside(f"def {name}({argument}):", body)
        # A new tensor: what a reentrant checkpoint returns becomes its output, and a captured one would too.
        self._line(f"    return {self._values[-1] if len(self._values) > 2 else argument} * 1.0")
        self._values, self._in_function = outer

    def _checkpoint(self, reentrant: bool, number: int, body: Any = ()) -> None:
        if self._in_checkpoint or self._in_inference:
            return
        given, name, argument = self._values[number % len(self._values)], self._new("f"), self._new("a")
        self._in_checkpoint = self._has_checkpoint = True
        self._in_reentrant = reentrant
        self._nested(name, argument, body)
        self._in_checkpoint = self._in_reentrant = False
        value = self._new()
        self._line(f"{value} = checkpoint({name}, {given} + x0, use_reentrant={reentrant})")
        self._values.append(value)

    def _no_grad(self, body: Any = ()) -> None:
        self._inside("with torch.no_grad():", body)

    def _inference(self, body: Any = ()) -> None:
        if self._in_inference or self._in_checkpoint:
            return
        self._in_inference = True
        self._inside("with torch.inference_mode():", body)
        self._in_inference = False

    def _write(self, how: str, number: int, other: int) -> None:
        w, u = _from(number)[0], _from(other)[0]
        in_region = len(self._dtypes) > 1
        if self._in_checkpoint or self._in_inference or (w == u and "{u}" in how):
            return
        if in_region and not self._on and how not in COUNTED:
            return  # documented as not seen
        if how in COUNTED:
            self._line("with torch.no_grad():")
        self._line("    " * (how in COUNTED) + how.format(w=w, u=u))
        if in_region:
            self._line("side.written()")
            self._outermost.banned |= self._outermost.dtypes.keys() - {w}

    def _backward(self) -> None:
        inside = len(self._dtypes) > 1
        if self._in_function or self._in_inference or (inside and self._has_checkpoint):
            return
        self._line(f"backward(side, {', '.join(self._values)})")
        self._values = ["x0", "x1"]
        self._has_checkpoint = False


def _from(number: int) -> tuple[str, ...]:
    """The weights, beginning with one: where it is free, the same number means the same weight."""
    start = number % len(MATRICES)
    return MATRICES[start:] + MATRICES[:start]


def _named_in(template: str, w: str, u: str) -> Iterator[str]:
    yield from (name for name, mark in ((w, "{w}"), (u, "{u}")) if mark in template)
    yield from (name for name in ("b0", "s0", "k0") if name in template)


def printed(nodes: tuple[Node, ...]) -> str:
    return Printer().print(nodes)
