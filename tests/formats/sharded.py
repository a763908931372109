"""Train in each format below 16 bits on two ranks, whole and sharded by FSDP2, and write the losses as JSON."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import amp_plugin
from amp_plugin.precision import BELOW_16_BITS


def losses(name: str, *, sharded: bool) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    net = amp_plugin.convert(net, name, emulate=True)
    for module in (net[0], net[2], net) if sharded else ():
        fully_shard(module)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = amp_plugin.GradScaler("cpu", enabled=False)
    generator, seen = torch.Generator().manual_seed(3), []
    for step in range(6):
        x = torch.randn(64, 64, generator=generator) * (float("inf") if step == 3 else 1.0)
        with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
            loss = (net(x) - x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert scaler.clip_and_step(optimizer, 1.0).skipped == (step == 3)
        seen.append(loss.item())
    return seen


def main(file: Path) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    seen = {name: [losses(name, sharded=sharded) for sharded in (False, True)] for name in BELOW_16_BITS}
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()
