"""Random op graphs: a tree of ops, regions, checkpoints and writes, which is printed as a program.

Operands are numbers, taken modulo the number of values that exist at that point. So any part of a graph is a
valid graph, which shrinking requires.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MATRICES = ("w0", "w1", "w2", "w3")
# {a}, {b}: values; {m}, {n}: values whose dtype matches a weight's; {w}, {u}: weights. All are 4 x 8 or 8 x
# 8. No op gets the same tensor twice: the order in which its two casts are made, and their gradients added,
# would depend on the compiler that built torch.
OPS = {
    "linear": "F.linear({m}, {w}, b0)",
    "linear without bias": "F.linear({m}, {w})",
    "tied": "F.linear(F.linear({m}, {w}), {w}.t())",
    "matmul": "{m} @ {w}",
    "addmm": "torch.addmm({n}, {m}, {w})",
    "bmm": "({m}.reshape(2, 2, 8) @ {w}).reshape(4, 8)",
    "einsum": "torch.einsum('ij,kj->ik', {m}, {w})",
    "gram": "({m} @ {n}.t()).softmax(-1) @ {n}",
    "weight's view": "{m} @ {w}[:, [1, 0, 3, 2, 5, 4, 7, 6]]",
    "weight's reshape": "{m} @ {w}.view(4, 16).view(8, 8)",
    "scaled weight": "{m} @ ({w} * 0.5)",
    "cat of weights": "{m} @ torch.cat([{w}[:4], {u}[4:]])",
    "sum of weights": "{m} @ ({w} + {u})",
    "no parameter": "{m} @ c0",
    "conv": "F.conv1d({m}[None], k0, padding=1)[0]",
    "attention": "F.scaled_dot_product_attention({m}[None], {n}[None], {n}[None] * 0.5)[0]",
    "custom": "Product.apply({m}, {w})",
    "embedding": "F.embedding(torch.tensor([3, 1, 1, 0]), {w}) + {a}",
    "layer_norm": "F.layer_norm({a}, (8,), s0.to({a}.dtype), b0.to({a}.dtype))",
    "rms_norm": "F.rms_norm({a}.float(), (8,), s0)",
    "softmax": "{a}.softmax(-1)",
    "log_softmax": "F.log_softmax({a}, 0)",
    "gelu": "F.gelu({a})",
    "tanh": "{a}.tanh()",
    "exp": "({a} * 0.1).exp()",
    "pow": "{a}.abs().pow(0.5)",
    "centre": "{a} - {a}.mean(-1, keepdim=True)",
    "norm": "{a} / ({a}.norm() + 1)",
    "cumsum": "{a}.cumsum(0) * 0.25",
    "loss": "{a} * F.mse_loss({a}, {b})",
    "add": "({a} + {b}) * 0.5",
    "mul": "{a} * {b}.tanh()",
    "scale": "{a} * s0",
    "cat": "torch.cat([{a}, {b}], 1)[:, ::2]",
    "stack": "torch.stack([{a}, {b}]).mean(0)",
    "where": "torch.where({a} > {b}, {a}, {b})",
    "view": "{a}.reshape(2, 16).view(4, 8)",
    "transpose": "{a}.reshape(8, 4).t()",
    "index": "{a}[[2, 0, 3, 1]]",
    "chunk": "torch.cat({a}.chunk(2, 1)[::-1], 1)",
    "expand": "{a}[:1].expand(4, 8)",
    "dropout": "F.dropout({a}, 0.5)",
    "float": "({a} * 1.0).float()",
    "bf16": "({a} * 1.0).to(torch.bfloat16)",
    "relu_": "({a} * 1.0).relu_()",
    "add_": "{a}.clone().add_({b})",
    "mul_": "{a}.clone().mul_({b})",
    "copy_": "{a}.clone().copy_({b})",
}

COUNTED = (
    "{w}.mul_(0.5)",
    "{w}.copy_({w}.flip(0))",
    "{w}.add_(0.125)",
    "{w}.neg_()",
    "{w}[0] = 0.25",
    "{w}.addmm_({u}.detach(), {u}.detach(), alpha=0.125)",
)
"""Writes that move the weight's version counter."""

ALIASED = (
    "{w}.data.mul_(0.5)",
    "{w}.data.copy_({w}.data.flip(0))",
    "{w}.data.add_(0.125)",
    "{w}.data.neg_()",
    "{w}.data[0] = 0.25",
    "{w}.data[:, 1:3].zero_()",
    "{w}.detach().mul_(0.5)",
    "{w}.data.addmm_({u}.data, {u}.data, alpha=0.125)",
    "{w}.data.clamp_(-0.25, 0.25)",
    "{w}.data.lerp_({w}.data.flip(0), 0.5)",
    "torch.mul({w}.data, 0.5, out={w}.data)",
    "torch.mm({u}.detach(), {u}.detach(), out={w}.data)",
    "torch._foreach_mul_([{w}.data], 0.5)",
    "torch.nn.init.constant_({w}, 0.125)",
    "{w}.data = {w}.data * 0.5",
)
"""Writes through an alias; in a region they are seen."""

STEPPED = ("step({w}, foreach=False)", "step({w}, foreach=True)", "step({w}, fused=True)")
"""Steps of an optimizer."""


@dataclass(frozen=True)
class Node:
    """A statement. Some statements contain others."""

    kind: str
    args: tuple[Any, ...] = ()
    body: tuple[Node, ...] = ()


def generate(rng: random.Random) -> tuple[Node, ...]:
    """Make a graph of some iterations, each with one or two regions and a backward pass."""
    nodes: list[Node] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        nodes += _block(rng, rng.randint(1, 3), 0)
        nodes.append(_region(rng, 1))
        if rng.random() < 0.5:
            nodes += _block(rng, rng.randint(1, 2), 0)
        nodes.append(Node("backward"))
        if rng.random() < 0.5:
            nodes += _written_between(rng, lambda weight: _region(rng, 1, weight))
    return tuple(nodes)


def _block(rng: random.Random, count: int, depth: int) -> list[Node]:
    return [node for _ in range(count) for node in _nodes(rng, depth)]


def _nodes(rng: random.Random, depth: int) -> list[Node]:
    if rng.random() < 0.03:
        return _written_between(rng, lambda weight: _op(rng, weight))
    return [_node(rng, depth)]


def _written_between(rng: random.Random, use: Callable[[int], Node]) -> list[Node]:
    weight = rng.randrange(len(MATRICES))
    return [use(weight), _write(rng, weight), use(weight)]


def _op(rng: random.Random, weight: int | None = None) -> Node:
    names = [name for name in OPS if weight is None or "{w}" in OPS[name]]
    numbers = [rng.randrange(100) for _ in range(4)]
    if weight is not None:
        numbers[2] = weight
    return Node("op", (rng.choice(names), *numbers))


def _node(rng: random.Random, depth: int) -> Node:
    if rng.random() < 0.72 or depth > 3:
        return _op(rng)
    makers = {
        "region": (5, lambda: _region(rng, depth + 1)),
        "checkpoint": (4, lambda: _checkpoint(rng, depth)),
        "no_grad": (2, lambda: Node("no_grad", (), _body(rng, depth))),
        "inference": (1, lambda: Node("inference", (), _body(rng, depth))),
        "write": (3, lambda: _write(rng, rng.randrange(len(MATRICES)))),
        "backward": (0.7, lambda: Node("backward")),
    }
    kind = rng.choices(list(makers), [weight for weight, _ in makers.values()])[0]
    return makers[kind][1]()


def _checkpoint(rng: random.Random, depth: int) -> Node:
    return Node("checkpoint", (rng.random() < 0.5, rng.randrange(100)), _body(rng, depth))


def _body(rng: random.Random, depth: int) -> tuple[Node, ...]:
    return tuple(_block(rng, rng.randint(1, 4), depth + 1))


def _region(rng: random.Random, depth: int, weight: int | None = None) -> Node:
    dtype = "fp16" if rng.random() < 0.25 else "bf16"
    enabled = depth == 1 or rng.random() < 0.6
    cached = rng.random() < 0.85
    form = "decorator" if rng.random() < 0.1 else "with"
    body = _block(rng, rng.randint(2, 7), depth)
    if weight is not None:
        body.insert(0, _op(rng, weight))
    return Node("region", (dtype, enabled, cached, form), tuple(body))


def _write(rng: random.Random, weight: int) -> Node:
    how = rng.choice((*COUNTED, *ALIASED, *STEPPED))
    return Node("write", (how, weight, rng.randrange(100)))


def shorter(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """Yield every graph with one statement less, or with a block replaced by its contents."""
    for i, node in enumerate(nodes):
        before, after = nodes[:i], nodes[i + 1 :]
        yield (*before, *after)
        if node.body:
            yield (*before, *node.body, *after)
            for body in shorter(node.body):
                yield (*before, Node(node.kind, node.args, body), *after)


# -- printing ---------------------------------------------------------------------------------------

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
    """Prints a graph as a program that uses the names of :mod:`tests.fuzz.two_sides`.

    Some cases are left out because torch.autocast gives no usable answer. One is a leaf that is cast to two
    dtypes in one region: torch keeps only the first cast. Another is a leaf that is used before and after a
    weight is written: all casts are dropped so that torch sees the write. Regions in the function of a
    reentrant checkpoint are left out too, because docs/reference/autocast.md says that they differ.
    """

    def __init__(self) -> None:
        self.lines = HEADER.split("\n")
        self._indent = ""
        self._values = ["x0", "x1"]
        self._count = 0
        self._dtypes: list[str | None] = [None]  # dtypes of the open regions; None if autocast is off there
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
        """Print a region that decorates a function of one value."""
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
        # Return a new tensor, because a reentrant checkpoint would turn a captured tensor into its output.
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
            return  # the documentation says that this write is not noticed
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
    """Return all weights, starting with the one of this number.

    If that one may be used, the same number means the same weight.
    """
    start = number % len(MATRICES)
    return MATRICES[start:] + MATRICES[:start]


def _named_in(template: str, w: str, u: str) -> Iterator[str]:
    yield from (name for name, mark in ((w, "{w}"), (u, "{u}")) if mark in template)
    yield from (name for name in ("b0", "s0", "k0") if name in template)


def printed(nodes: tuple[Node, ...]) -> str:
    return Printer().print(nodes)
