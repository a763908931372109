"""Training steps that go wrong from one step on, or once; the line to be named ends in ``# <-``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FAULTS: list[Fault] = []
FROM = 3  # the first step that is wrong, counted from 0
STEPS = 8


@dataclass(frozen=True)
class Fault:
    """A step that goes wrong."""

    loss: Callable[[Net, Tensor, int], Tensor]  # of a net, a batch and the number of the step
    op: str  # a regular expression for the op to name
    precision: str
    recorded: bool  # whether the loop runs its passes through scaler.recorded
    lr: float  # of plain SGD

    @property
    def name(self) -> str:
        return self.loss.__name__

    @property
    def line(self) -> int:
        for owner in (self.loss, Net.forward):
            lines, first = inspect.getsourcelines(owner)
            for number, text in enumerate(lines, first):
                if text.rstrip().endswith(("# <-", "# <- without another")):
                    return number
        raise ValueError(self.name)


def seeded(op: str, *, precision: str = "bf16", recorded: bool = False, lr: float = 1e-3):
    """Register a fault."""

    def register(loss):
        FAULTS.append(Fault(loss, op, precision, recorded, lr))
        return loss

    return register


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        return self.last(torch.tanh(self.first(x)))  # <- without another


@seeded("mul", precision="fp16")
def product_beyond_fp16(net, x, step):
    out = net(x)
    return (out * (1e9 if step >= FROM else 1.0)).float().mean()  # <-


@seeded("log")
def log_of_zero(net, x, step):
    out = net(x).float()
    shares = out.softmax(-1) * (0.0 if step >= FROM else 1.0)
    return -shares.log().mean()  # <-


@seeded("div")
def zero_by_zero(net, x, step):
    out = net(x).float()
    weights = torch.zeros(8) if step >= FROM else torch.ones(8)
    return (out * weights).sum() / weights.sum()  # <-


@seeded("sqrt", recorded=True)
def root_of_zero_in_backward(net, x, step):
    out = net(x).float()
    gap = out - out.detach() if step == FROM else out.abs() + 1.0
    return gap.sqrt().sum()  # <-


@seeded("addmm|linear")
def one_bad_batch(net, x, step):
    if step == FROM:
        x = x.masked_fill(torch.arange(8) == 2, math.nan)
    return net(x).float().mean()


@seeded("pow|mul|addmm|mm|linear|sub|square", precision="fp32", lr=1e25)
def exploding_rate(net, x, step):
    return net(x).square().mean()


@seeded("softmax", recorded=True)
def row_of_masks_alone(net, x, step):
    scores = net(x).float()
    if step == FROM:
        scores = scores.masked_fill(torch.arange(scores.shape[0])[:, None] == 1, -math.inf)
    return scores.softmax(-1).square().sum()  # <-


@seeded("exp", precision="fp32")
def exponential_of_much(net, x, step):
    out = net(x)
    return (out + (200.0 if step >= FROM else 0.0)).exp().mean()  # <-


@seeded("matmul|mm|bmm", precision="fp16")
def scores_beyond_fp16(net, x, step):
    queries = net(x) * (900.0 if step >= FROM else 1.0) + (300.0 if step >= FROM else 0.0)
    scores = queries @ queries.T  # <-
    return scores.softmax(-1).float().square().sum()


class Broken(torch.autograd.Function):
    """Passes through, with a nan in its backward pass."""

    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * (math.nan if ctx.bad else 1.0)), None


@seeded("Broken")
def function_with_a_nan_in_backward(net, x, step):
    out = Broken.apply(net(x).float(), step >= FROM)  # <-
    return out.mean()


@seeded("mean|div")
def mean_of_nothing(net, x, step):
    out = net(x).float()
    chosen = out[out > (1e6 if step >= FROM else -1e6)]
    return chosen.mean()  # <-


@seeded("log|mul")
def nothing_times_infinity(net, x, step):
    shares = net(x).float().log_softmax(-1)
    wanted = torch.eye(8)[: shares.shape[0]]
    if step >= FROM:
        shares = shares + torch.log(torch.zeros(8))  # <-
    return -(wanted * shares).sum()


@seeded("rsqrt", recorded=True)
def norm_without_eps(net, x, step):
    out = net(x).float() * (0.0 if step == FROM else 1.0)
    return (out * out.square().mean(-1, keepdim=True).rsqrt()).sum()  # <-
