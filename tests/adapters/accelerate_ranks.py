"""The program that test_accelerate_distributed.py runs in each of two processes.

It writes FOLDER/rankN.json.
"""

import json
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from tests.adapters.accelerate_pair import Weights, reset
from tests.process_groups import leave

OVERFLOW = 1e38


def distributed_data_parallel():
    """Train under DDP: one step with a clip after each micro-batch, then one that overflows on rank 1 only."""
    reset()
    accelerator = AmpAccelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[AmpKwargs(init_scale=8.0, growth_interval=1)],
    )
    rank = accelerator.process_index
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    report = {"kind": (accelerator.distributed_type.value, accelerator.device.type)}

    def run(factor, clips=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(factor))
            if clips:
                report["norm"] = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    for factor in (2.0, 6.0):  # the mean of factor + rank over two ranks and two micro-batches
        run(factor + rank, clips=True)
    report |= {"weight": model.module.weight.tolist(), "scale": accelerator.scaler.get_scale()}
    for _ in range(2):
        run(OVERFLOW if rank == 1 else 1.0)
    report |= {"skipped": accelerator.optimizer_step_was_skipped, "rate": schedule.get_last_lr()[0]}
    report |= {"weight_after": model.module.weight.tolist(), "scale_after": accelerator.scaler.get_scale()}
    return report


class Layer(torch.nn.Module):
    """A layer whose gradient norm is 4 at a factor of 2 and inputs of 1.

    One rank's shard holds the factor.
    """

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x, factor):
        hidden = self.linear(x)
        self.inside = hidden.dtype, torch.is_autocast_enabled(x.device.type)
        return hidden.sum() + factor * self.linear.weight.flatten()[0]


def fully_sharded(folder, precision, version=2):
    """Train under FSDP: save and load a checkpoint, take a clipped step, then one that overflows on rank 1
    only.
    """
    reset()
    accelerator = AmpAccelerator(
        mixed_precision=precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="NO_WRAP",
            cpu_ram_efficient_loading=False,
            use_orig_params=True if version == 1 else None,
        ),
        kwargs_handlers=[AmpKwargs(init_scale=8.0, growth_interval=2)],
    )
    torch.manual_seed(0)
    model = Layer()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert accelerator.distributed_type == DistributedType.FSDP
    if version == 2:  # torch's FSDP1 crashes when it saves on the CPU
        accelerator.save_state(folder)  # save_state and load_state each step once to create optimizer state;
        # those are not steps of this test, so undo them (huggingface/accelerate#4289)
        optimizer.optimizer.state.clear()
        accelerator.load_state(folder)
        optimizer.optimizer.state.clear()
    scaler, rank = accelerator.scaler, accelerator.process_index
    report = {"tracker": scaler.state_dict()["_growth_tracker"] if scaler is not None else 0}
    for factors in ((2.0, 2.0), (1.0, OVERFLOW)) if scaler is not None else ((2.0, 2.0),):
        before = [local(p).clone() for p in model.parameters()]
        output = model(torch.ones(1, 4, device=accelerator.device), factors[rank])
        accelerator.backward(output)
        if factors == (2.0, 2.0):
            report["norm"] = local(accelerator.clip_grad_norm_(model.parameters(), 0.5)).item()
        optimizer.step()
        optimizer.zero_grad()
    unchanged = all(torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True))
    report |= {"output": str(output.dtype), "inside": str(model.inside), "unchanged": unchanged}
    report["skipped"] = accelerator.optimizer_step_was_skipped
    report["overflowed"] = sorted(accelerator.last_step(optimizer).overflow_report().inf)
    return report


def local(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_cpu_as_on_gpus(state, *_args, **_kwargs):
    """Accelerate supports FSDP on GPUs only. Let it treat two CPU processes like two GPU processes."""
    return "gloo", DistributedType.MULTI_GPU


def main(folder: Path, device: str) -> None:
    report = {"ddp": distributed_data_parallel()}
    if device == "cpu":
        PartialState._prepare_backend = on_cpu_as_on_gpus
        PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
        torch.accelerator.is_available = lambda: True
        # otherwise a CUDA build of torch would return CUDA
        torch.accelerator.current_accelerator = lambda *_, **__: None
    for precision in ("fp16", "bf16"):
        report[precision] = fully_sharded(str(folder / precision), precision)
    report["fsdp1"] = fully_sharded(str(folder / "fsdp1"), "fp16", version=1)
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    leave()
