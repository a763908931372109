"""Names that the printed sequences use: losses, optimizers, and a write that changes no version counter.

Everything here works on float32 and on float64 parameters, so the oracle trains with the same functions.
"""

import math

import torch
from torch import Tensor

inf, nan = math.inf, math.nan


def loss(*terms: tuple[Tensor, float]) -> Tensor:
    """Return a loss whose gradient depends slightly on the weights and never changes its sign."""
    return sum((factor * (param + 0.25 * param.sin())).sum() for param, factor in terms)


def linear(*terms: tuple[Tensor, float]) -> Tensor:
    """Return a loss whose backward may run after the weights were stepped."""
    return sum((factor * param).sum() for param, factor in terms)


def collective(factor: float, *grads: Tensor) -> None:
    """Multiply gradients as a collective does: no version counter changes."""
    for grad in grads:
        with torch.autograd._unsafe_preserve_version_counter(grad):
            grad.mul_(factor)


class ThirdParty(torch.optim.Optimizer):
    """Adagrad written by hand.

    It does not know loss scales, and a counter outside the parameters' state shortens its steps.
    """

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        value = None if closure is None else torch.enable_grad()(closure)()
        count = self.state.setdefault("count", torch.zeros((), dtype=torch.float64))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("total", torch.zeros_like(param))
                    total.addcmul_(param.grad, param.grad)
                    rate = group["lr"] / (1.0 + count.item())
                    param.addcdiv_(param.grad, total.sqrt() + 1e-3, value=-rate)
        count.add_(1.0)
        return value


class TwoCalls(torch.optim.Optimizer):
    """Sharpness-aware minimization.

    It steps uphill, calls the closure again, and steps from the original point.
    """

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        value = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starts = [param.detach().clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=0.01)
        closure()
        for param, start in zip(params, starts, strict=True):
            param.copy_(start - self.param_groups[0]["lr"] * param.grad)
        return value


_SGD, _ADAMW = torch.optim.SGD, torch.optim.AdamW

OPTIMIZERS = {
    "sgd": (_SGD, {"lr": 0.1}),
    "sgd_momentum": (_SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_fused": (_SGD, {"lr": 0.1, "fused": True}),
    "sgd_fused_momentum": (_SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adamw_fused": (_ADAMW, {"lr": 0.05, "fused": True}),
    "adamw_foreach": (_ADAMW, {"lr": 0.05, "foreach": True}),
    "third_party": (ThirdParty, {}),
    "two_calls": (TwoCalls, {}),
}
"""Each kind of optimizer: its class and options."""


def optimizer(kind: str, params: list[Tensor]) -> torch.optim.Optimizer:
    """Make an optimizer of one of the kinds above."""
    cls, options = OPTIMIZERS[kind]
    return cls(params, **options)


def plain(kind: str, params: list[Tensor]) -> torch.optim.Optimizer:
    """Make the same optimizer in its simplest form: neither fused nor foreach."""
    cls, options = OPTIMIZERS[kind]
    options = {key: value for key, value in options.items() if key not in {"fused", "foreach"}}
    return cls(params, **options)
