"""Random op graphs: a tree of ops, regions, checkpoints and writes, printed as a program.

Operands are numbers, taken modulo what there is where they stand. So any part of a graph is a
graph, which is what shrinking needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MATRICES = ("w0", "w1", "w2", "w3")
# {a}, {b}: values; {m}, {n}: values whose dtypes fit a weight's; {w}, {u}: weights. All are 4 x 8 or 8 x 8.
# No op is given one tensor twice: in which order its two casts are made, and so in which order their gradients
# are added, is up to the compiler that built torch.
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
    """A statement; some hold others."""

    kind: str
    args: tuple[Any, ...] = ()
    body: tuple[Node, ...] = ()


def generate(rng: random.Random) -> tuple[Node, ...]:
    """Make a graph: some iterations, each with a region or two and a backward pass."""
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
    """Every graph with one statement less, or with a block replaced by what is in it."""
    for i, node in enumerate(nodes):
        before, after = nodes[:i], nodes[i + 1 :]
        yield (*before, *after)
        if node.body:
            yield (*before, *node.body, *after)
            for body in shorter(node.body):
                yield (*before, Node(node.kind, node.args, body), *after)
