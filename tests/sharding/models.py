"""The model and the data of the sharding tests, and training on one process."""

import torch
from torch import nn

from amp_plugin import DtypePlan, autocast
from amp_plugin.casting.run_in import apply_fp32_modules

STEPS, FEW_STEPS, ROWS = 20, 4, 2
IN_FP32 = ("LayerNorm",)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks with a norm each. A factor makes the gradient of one element of one weight overflow."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.blocks = nn.Linear(5, 6), nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x, factor=None):
        y = self.inp(x)
        for block in self.blocks:
            y = block(y)
        y = self.head(y)
        return y if factor is None else y + factor * self.inp.weight.flatten()[0]


def plan(precision="bf16", fp32_modules=IN_FP32, reduce="fp32"):
    return DtypePlan(compute=precision, fp32_modules=fp32_modules, reduce=reduce)


def batch(step, share):
    generator = torch.Generator().manual_seed(100 * step + share)
    x = torch.randn(ROWS, 5, generator=generator)
    return x, x.sum(1, keepdim=True).cos()


def loss_of(net, step, share, factor=None):
    x, y = batch(step, share)
    return nn.functional.mse_loss(net(x, factor).float(), y)


def optimizer_of(params, *, fused=False):
    return torch.optim.AdamW(params, lr=1e-2, fused=fused, foreach=not fused)  # torch chooses this on a GPU


def alone(shares, precision="bf16", fp32_modules=IN_FP32, steps=STEPS, change=None):
    """Train in one process on the rows of all ranks, with one micro-batch per rank."""
    net = Net()
    apply_fp32_modules(net, fp32_modules)
    if change is not None:
        change(net)
    optimizer, losses = optimizer_of([p for p in net.parameters() if p.requires_grad]), []
    for step in range(steps):
        optimizer.zero_grad()
        parts = []
        for share in range(shares):
            with autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32"):
                loss = loss_of(net, step, share)
            (loss / shares).backward()
            parts.append(loss.detach())
        optimizer.step()
        losses.append(torch.stack(parts).mean())
    return torch.stack(losses), flat(net)


def flat(net):
    return torch.cat([whole(param).detach().flatten() for param in net.parameters()])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
