"""Compare three FSDP2 setups: exact bfloat16 shards, float32 shards and plain bfloat16 shards.

    python -m recipes run fsdp2_exact_bf16 [precision=fp16] [key=value ...]

    torchrun --nproc-per-node 2 -m recipes run fsdp2_exact_bf16 [key=value ...]

A model that is sharded in bfloat16 loses small weight updates. Float32 shards keep small updates, but FSDP2
must cast each shard before the all-gather. With ``weights="bf16"``, each float32 weight is split into a
bfloat16 number and the other 16 bits. Only the bfloat16 part is communicated. This split loses no weight
update, and needs no cast of the shards before the all-gather. With ``state="8bit"``, the optimizer's moments
are rounded to 8 bits, and take a quarter of the memory of float32 moments.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from amp_plugin import DtypePlan, GradScaler, autocast, fully_shard, store_weights
from amp_plugin.precision import StateName
from amp_plugin.weights.store import weight_bytes
from recipes.shared import (
    DigitsNet,
    Precision,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
    on_ranks,
    process_group,
)

IN_16_BITS, IN_FP32, EXACT = "16-bit shards", "float32 shards", "exact 16-bit shards"
COMPRESSED = f"{EXACT}, 8-bit moments"
WAYS = {  # the plots of the loss and the loss scale show the last run
    Precision.bf16: (IN_16_BITS, IN_FP32, EXACT, COMPRESSED),
    Precision.fp16: (
        IN_FP32,
        EXACT,
        COMPRESSED,
    ),  # plain fp16 shards have fp16 gradients, which GradScaler refuses
    Precision.fp32: (IN_FP32,),
}


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    precision: Precision = Precision.bf16
    processes: int = number(2, least=1)
    max_norm: float = number(1.0, above=0)
    width: int = number(16, least=4, multiple_of=4)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier on several processes, once for each way to store the shards.

    Args:
        config: A config that was checked.
    """
    return on_ranks(train_rank, config, config.processes)


def train_rank(config: Config) -> TrainingRecord:
    """Train one rank. All ranks return the same losses."""
    config.start()
    with process_group(config.device) as (_, ranks):
        record = TrainingRecord(title=f"exact shards, {ranks} processes, {config.precision.value}")
        start, ways = time.perf_counter(), WAYS[config.precision]
        for way in ways:
            _train(way, config, record, is_last=way == ways[-1])
        record.seconds = time.perf_counter() - start
    return record


def _train(way: str, config: Config, record: TrainingRecord, *, is_last: bool) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed)
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    net = DigitsNet(config.width).to(config.device)
    if way == IN_16_BITS:
        net.to(config.precision.dtype)
    mesh = init_device_mesh(config.device, (ranks,))
    plan = DtypePlan(compute=config.precision.value)
    fully_shard(net, plan, units=[net.classifier], mesh=mesh)  # one FSDP2 unit for the last layer
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate)
    if way.startswith(EXACT):
        state: StateName = "8bit" if way == COMPRESSED else "fp32"
        store_weights(net, optimizer, weights=config.precision.value, state=state)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)
    losses: list[Tensor] = []
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    seconds: list[float] = []
    for images, labels in track(batches, way, total=config.steps, disable=rank > 0):
        start = time.perf_counter()
        optimizer.zero_grad()
        share = ranks / len(images)
        with region:
            logits = net(images[rank::ranks])
            loss = share * cross_entropy(logits.float(), labels[rank::ranks], reduction="sum")
        scaler.scale(loss).backward()
        scaler.clip_and_step(optimizer, config.max_norm)
        scaler.update()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean)
        mean.item()  # wait for the device, so that the time of the whole step is measured
        seconds.append(time.perf_counter() - start)
        if is_last:
            record.add_scaled_step(mean, scaler, optimizer)
    held = weight_bytes(net, optimizer)
    record.compare("loss of each way", way, [loss.item() for loss in losses])
    record.results[f"bytes per parameter of a rank, {way}"] = held.total / held.parameters
    record.results[f"milliseconds per step, {way}"] = 1000 * median(seconds)
    last = losses[-20:]
    record.results[f"loss, {way}"] = torch.stack(last).mean().item()
    if is_last:
        record.test_accuracy = accuracy(net, loaders.test, region=region, device=config.device)


if __name__ == "__main__":
    train(Config()).show(Path("runs/fsdp2_exact_bf16"))
