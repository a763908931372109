"""A model, its layouts over ranks, and the same run with float32 shards and with shards stored in 16 bits."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from lion_pytorch import Lion
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from amp_plugin import GradScaler, autocast, log_collectives, store_weights
from amp_plugin.weights.shard import local_of

BF16, FP32 = torch.bfloat16, torch.float32
POISONED, OVERFLOWS = 2, 3  # the step with a bad batch on one rank, and that with a bad gradient on one rank
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Lion": lambda params: Lion(params, lr=1e-3),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),  # has no rule, so torch's own step runs
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x).to(x.dtype))))


class Net(nn.Module):
    """A model with uneven and empty shards, a tied weight, a frozen layer and a checkpointed block."""

    def __init__(self, seed, *, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.inp, self.blocks = nn.Linear(4, 6), nn.ModuleList(Block() for _ in range(2))
        self.mix, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        if tied:
            self.again.weight = self.mix.weight
        self.base, self.odd, self.head = (
            nn.Linear(6, 6).requires_grad_(False),
            nn.Linear(6, 5),
            nn.Linear(5, 1),
        )

    def forward(self, x):
        y = self.blocks[0](self.inp(x))
        y = checkpoint(self.blocks[1], y, use_reentrant=False)
        y = self.again(torch.tanh(self.mix(y))) + self.base(y)
        return self.head(self.odd(y))


# The parameters of Net that are not stored: norms are gathered in float32, and the base is frozen.
NOT_STORED = {
    *(f"blocks.{block}.norm.{name}" for block in range(2) for name in ("weight", "bias")),
    *("base.weight", "base.bias"),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks are divided. Without meshes, each rank trains alone.

    Attributes:
        mesh: The mesh for FSDP2. If it has two dimensions, the first one replicates.
        parallel: The mesh for tensor parallelism.
        share: Which rows belong to this rank.
        is_poisoned: Whether this is the rank that meets a bad batch and a bad gradient.
        is_tied: Whether the model has a tied weight. Without FSDP2 it must not: gradients of a tied weight are
            added in float32 in a stored model, but in bfloat16 under autocast.
        options: Options of ``fully_shard``.
        before: Whether weights are stored before they are sharded.
    """

    mesh: object = None
    parallel: object = None
    share: int = 0
    is_poisoned: bool = False
    is_tied: bool = True
    options: dict = field(default_factory=dict)
    before: bool = False

    def region(self):
        """Return the region in which the model runs. FSDP2's policy casts where there is one."""
        return autocast("cpu", dtype=BF16, enabled=self.mesh is None)


def policy(param_dtype=BF16):
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=FP32, cast_forward_inputs=param_dtype is BF16
    )


def shard(net, layout):
    if layout.parallel is not None:
        ways = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(net, layout.parallel, ways)
    if layout.mesh is None:
        return net
    options = {"mesh": layout.mesh, **layout.options}
    for block in net.blocks:
        fully_shard(block.norm, mp_policy=policy(FP32), **options)
        fully_shard(block, mp_policy=policy(), **options)
    return fully_shard(net, mp_policy=policy(), **options)


def batch(step, micro, share):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + share)
    x = torch.randn(3, 4, generator=generator)
    return x, x.sum(1, keepdim=True).cos()


def shards(net):
    """Return this rank's exact weights as one flat tensor, including unsharded parameters."""
    return torch.cat([local_of(value).flatten() for value in net.state_dict().values()])


def ties(row):
    return int(((row.view(torch.int32) & 0xFFFF) == 0x8000).sum())


@dataclass
class Trained:
    weights: torch.Tensor  # one row per step
    skipped: list
    how: str
    ties: int
    net: nn.Module
    optimizer: torch.optim.Optimizer
    last: Counter  # collectives of the last step


def train(layout, optimizer="AdamW", *, stored, steps, seed=0, state="fp32", one_pass=True, weights="bf16"):
    """Train with two micro-batches per step and a clip. One rank has a bad batch, then a bad gradient."""
    net = Net(seed, tied=layout.is_tied)
    if stored and layout.before:
        store_weights(net, weights=weights, state=state)
    shard(net, layout)
    optimizer = OPTIMIZERS[optimizer]([param for param in net.parameters() if param.requires_grad])
    if (stored and not layout.before) or state != "fp32":
        store_weights(net, optimizer, weights=weights if stored else "fp32", state=state)
    scaler = GradScaler("cpu", enabled=False, one_pass=one_pass)
    rows, skipped = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with log_collectives() as log:
            for micro in range(2):
                if layout.mesh is not None:
                    net.set_requires_gradient_sync(micro == 1)
                x, y = batch(step, micro, layout.share)
                if layout.is_poisoned and (step, micro) == (POISONED, 0):
                    x = x * torch.inf
                with layout.region():
                    out = net(x)
                (nn.functional.mse_loss(out.float(), y) / 2).backward()
            if layout.is_poisoned and step == OVERFLOWS:
                local_of(net.blocks[0].up.weight.grad)[0, 0] = torch.inf
            scaler.clip_and_step(optimizer, 0.05)
        skipped.append(bool(scaler.last_step(optimizer).skipped))
        rows.append(shards(net))
    found = torch.stack(rows)
    calls = Counter((call.op, call.dtype, call.elements, call.bytes) for call in log)
    return Trained(
        found, skipped, scaler.last_step(optimizer).how, sum(map(ties, rows)), net, optimizer, calls
    )


def go_on(run, layout):
    """Take three more steps. Return the whole weights."""
    for step in range(10, 13):
        run.optimizer.zero_grad()
        x, y = batch(step, 0, layout.share)
        with layout.region():
            out = run.net(x)
        nn.functional.mse_loss(out.float(), y).backward()
        run.optimizer.step()
    return whole(run.net.state_dict())


def whole(values):
    """Return tensors, or nested dicts of tensors, as one flat tensor without shards, in the order of names."""
    parts = []
    for _, value in sorted(values.items()):
        if isinstance(value, dict):
            parts.append(whole(value))
        else:
            parts.append((value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().float())
    return torch.cat(parts)
