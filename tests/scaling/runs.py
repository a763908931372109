"""Small training runs with and without a loss scale, and the values to compare."""

import torch

from amp_plugin import GradScaler

SCALES = [None, 8.0]
"""Without a loss scale and with one."""


def scaler_of(scale, **options):
    """Return a scaler with this scale. None gives a scaler that scales nothing."""
    return GradScaler("cpu", **options, **({"enabled": False} if scale is None else {"init_scale": scale}))


def fresh(*optimizers, **options):
    """Return a scaler that knows these optimizers, and whose scale grows after each step without overflow."""
    scaler = GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 1, **options})
    scaler.register(*optimizers)
    return scaler


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
]
"""Kinds of optimizers and their options, each with state."""


def build(cls, options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, cls(model.parameters(), lr=0.1, **options)


def everything(model, optimizer):
    """Return all numbers of a model and its optimizer. Missing state counts as zero."""
    state = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [p.detach().clone() for p in model.parameters()], state


KINDS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
"""Optimizers that step in one pass."""

OTHERS = {
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),  # none of our ops can step it
    "maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True, "weight_decay": 0.1}),
}


class Run:
    """Parameters, an optimizer and a scaler. A backward pass gives random gradients."""

    def __init__(self, kind="adamw", *, dtype=torch.float32, scaler=None, **options):
        generator = torch.Generator().manual_seed(0)
        shapes = [(3, 5), (33,), ()]
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
        cls, defaults = {**KINDS, **OTHERS}[kind]
        self.optimizer = cls(self.params, **{**defaults, **options})
        self.scaler = scaler or scaler_of(2.0**10)

    def backward(self, seed=0, factor=1.0):
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        wanted = [torch.randn(p.shape, generator=generator) * factor for p in self.params]
        loss = sum((p * w.to(p.dtype)).sum() for p, w in zip(self.params, wanted, strict=True))
        self.scaler.scale(loss).backward()

    def step(self, seed=0, factor=1.0):
        self.backward(seed, factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.last_step(self.optimizer) if isinstance(self.scaler, GradScaler) else None

    def clip_and_step(self, seed=0, max_norm=0.5):
        self.backward(seed)
        result = self.scaler.clip_and_step(self.optimizer, max_norm)
        self.scaler.update()
        return result

    def gradients(self):
        return [param.grad.clone() for param in self.params]

    def values(self):
        return [param.detach().clone() for param in self.params]


def ulps(ours, theirs, *, of_largest):
    """Return the distance in units in the last place: of each element, or of the largest element.

    torch's loop over the last elements rounds the sum in a momentum at another place.
    """
    worst = 0.0
    largest = max(right.abs().max() for right in theirs)
    for mine, right in zip(ours, theirs, strict=True):
        size = largest if of_largest else right.abs()
        worst = max(worst, ((mine - right).abs() / size / torch.finfo(torch.float32).eps).max().item())
    return worst
