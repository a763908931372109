"""Programs written after the tolerance of ``assert_trains_like`` was fixed, with other models and other
losses.

The rule is that of ``programs.py``: ``apart`` below 0.05 is healthy, above 0.15 is differing. 14 programs
were written as healthy and 16 as differing. The first ten of each kind that satisfy the rule are here. The
tolerance was not changed after these programs first ran.
"""

import torch
from torch import nn
from torch.nn import functional

from tests.testing.programs import narrow_loss, plain, rounded_weights, trains

# -- models ----------------------------------------------------------------------------------------------------------


def _separable():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 12, 1),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 6),
    )
    x, target = torch.randn(48, 4, 9, 9), torch.randint(6, (48,))
    return model, lambda model, _: functional.cross_entropy(model(x), target)


def _autoencoder():
    model = nn.Sequential(nn.Linear(24, 6), nn.Softplus(), nn.Linear(6, 24))
    x = torch.randn(80, 24)
    return model, lambda model, _: functional.mse_loss(model(x).float(), x)


class _Pooled(nn.Module):
    """Attention with one learned query."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (
            nn.Parameter(torch.randn(12) / 4),
            nn.Linear(12, 12),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        scores = (self.key(x) @ self.query.to(torch.float32)) / 12**0.5
        return self.out((scores.softmax(1).unsqueeze(2) * x).sum(1))


def _pooled():
    x, target = torch.randn(40, 7, 12), torch.randint(5, (40,))
    return _Pooled(), lambda model, _: functional.cross_entropy(model(x), target)


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.parts = nn.Linear(10, 3), nn.ModuleList(nn.Linear(10, 8) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        return torch.stack([part(x) for part in self.parts], 2).mul(weights.unsqueeze(1)).sum(2)


def _experts():
    x, target = torch.randn(60, 10), torch.randint(8, (60,))
    return _Experts(), lambda model, _: functional.cross_entropy(model(x), target)


def _waves():
    model = nn.Sequential(
        nn.Conv1d(2, 8, 5, padding=2),
        nn.SiLU(),
        nn.Conv1d(8, 8, 5, padding=2, dilation=1),
        nn.Flatten(),
        nn.Linear(128, 1),
    )
    x, target = torch.randn(50, 2, 16), torch.randn(50, 1)
    return model, lambda model, _: functional.smooth_l1_loss(model(x).float(), target)


def _bags():
    model = nn.Sequential(nn.EmbeddingBag(30, 12, mode="mean"), nn.Linear(12, 4))
    x, target = torch.randint(30, (64, 9)), torch.randint(4, (64,))
    return model, lambda model, _: functional.cross_entropy(model(x), target)


class _Modulated(nn.Module):
    """A hidden layer that is scaled and shifted by a second input."""

    def __init__(self):
        super().__init__()
        self.inner, self.film, self.out = nn.Linear(9, 16), nn.Linear(3, 32), nn.Linear(16, 2)

    def forward(self, x, condition):
        scale, shift = self.film(condition).chunk(2, 1)
        return self.out(torch.tanh(self.inner(x) * (1 + scale) + shift))


def _modulated():
    x, condition, target = torch.randn(70, 9), torch.randn(70, 3), torch.randn(70, 2)
    return _Modulated(), lambda model, _: functional.mse_loss(model(x, condition).float(), target)


def _contrastive():
    model, x, y = nn.Sequential(nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 8)), None, None
    x = torch.randn(32, 20)
    y = x + 0.1 * torch.randn(32, 20)

    def loss(model, _):
        a, b = functional.normalize(model(x).float()), functional.normalize(model(y).float())
        return functional.cross_entropy(a @ b.T / 0.5, torch.arange(32))

    return model, loss


def _upsampled():
    model = nn.Sequential(
        nn.Linear(6, 32),
        nn.Unflatten(1, (8, 2, 2)),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
    )
    x, target = torch.randn(40, 6), torch.randn(40, 1, 8, 8)
    return model, lambda model, _: functional.mse_loss(model(x).float(), target)


def _logistic():
    x, target = torch.randn(90, 14), torch.randint(2, (90, 1)).float()
    return nn.Linear(14, 1), lambda model, _: functional.binary_cross_entropy_with_logits(
        model(x).float(), target
    )


# -- losses that cancel ----------------------------------------------------------------------------------------------


def _angle(y, t):
    """Return one minus the cosine of two nearly parallel vectors, computed by hand."""
    a, b = y + 60, t + 60
    return (1 - (a * b).sum(1) / ((a * a).sum(1) * (b * b).sum(1)).sqrt()).mean()


def _root(y, t):
    b = y.abs() + 90
    return ((b * b - 4 * t.abs()).clamp_min(0).sqrt() - b).square().mean()


def _fraction(y, t):
    return ((300 * y).frac() - t).square().mean()


def _steep(y, t):
    return (torch.tan(40 * y).clamp(-3, 3) - t).square().mean()


def _nearly_equal_products(y, t):
    return (1000 * y - 999 * y - t).square().mean()


def _third_moment(y, _):
    z = y + 30
    mean = z.mean(0)
    return ((z**3).mean(0) - 3 * mean * (z * z).mean(0) + 2 * mean**3).square().mean() / 1e2


def _curvature(y, _):
    step = 0.02
    return (((y + step).sin() - 2 * y.sin() + (y - step).sin()) / step**2).square().mean()


def _small_logarithm(y, t):
    return (1000 * torch.log(1 + y / 1000) - t).square().mean()


def _wrapped(y, t):
    return (torch.remainder(y * 150, 2) - t).square().mean()


HEALTHY = [*map(trains, (_separable, _autoencoder, _pooled, _experts, _waves, _bags, _modulated, _contrastive, _upsampled, _logistic))]  # fmt: skip
DIFFERING = [
    *map(narrow_loss, (_angle, _root, _fraction, _steep, _nearly_equal_products, _third_moment, _curvature, _small_logarithm, _wrapped)),
    rounded_weights(plain(12), torch.optim.RMSprop, 1e-5),
]  # fmt: skip
