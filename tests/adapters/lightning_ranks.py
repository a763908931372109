"""Run Trainers on two processes, one after another: ``python lightning_ranks.py FOLDER
STRATEGY:PRECISION...``.

Each rank writes what it saw to ``FOLDER/STRATEGY_PRECISION/rankN.json``. In fp16, the gradient of one element
of one weight overflows in step 2. Under FSDP2 only one rank then holds a shard that is not finite.

The first strategy that launches the script again starts a second process. The later runs use that process
too.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from amp_plugin.adapters.lightning import AmpMonitor, AmpPrecision
from tests.process_groups import destroy

STEPS, OVERFLOW_AT = 6, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, factor):
        return self.second(torch.relu(self.first(x))), factor * self.first.weight[0, 0]


class Module(LightningModule):
    def __init__(self, folder, sharded, poisoned=False):
        super().__init__()
        self.poisoned = poisoned
        self.net, self.folder, self.sharded, self.seen = Net(), folder, sharded, []

    def configure_model(self):
        if self.sharded and not hasattr(self.net, "unshard"):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.poisoned and self.global_step == OVERFLOW_AT and self.trainer.global_rank == 1:
            x = x.clone()
            x[0, 0] = torch.nan
        overflows = self.global_step == OVERFLOW_AT and self.trainer.precision_plugin.scaler is not None
        factor = torch.inf if overflows else 0.0
        out, extra = self.net(x, factor)
        return nn.functional.mse_loss(out, y) + extra

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for p in self.parameters()]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.seen.append(torch.stack([g.norm() for g in whole]).norm().item())

    def train_dataloader(self):
        """96 rows in order: rank r of n takes every n-th, so all ranks together see the same batches."""
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        mine = torch.utils.data.TensorDataset(x[rank::ranks], x[rank::ranks].sum(1, keepdim=True))
        return torch.utils.data.DataLoader(mine, batch_size=8 // ranks)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        plugin = self.trainer.precision_plugin
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.parameters()]
        last = plugin.last_step(self.trainer.optimizers[0])
        result = {
            "norms": self.seen,
            "norm": last.norm.item(),
            "scale": last.scale_after,
            "skipped": plugin.skipped_steps,
            "overflow": last.overflow_report().summary(),
            "weights": [w.detach().double().sum().item() for w in weights],
        }
        (self.folder / f"rank{self.trainer.global_rank}.json").write_text(json.dumps(result))


def strategy_of(name):
    if name == "fsdp2":
        return ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    return DDPStrategy(process_group_backend="gloo", start_method="spawn" if name == "ddp_spawn" else "popen")


def fit(name, precision, folder, *, poisoned=False):
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        plugins=[AmpPrecision(precision, init_scale=2.0**12)],
        callbacks=[AmpMonitor(report=folder / "run.html" if poisoned else None)],
        accelerator="cpu",
        strategy="auto" if name == "single" else strategy_of(name),
        devices=1 if name == "single" else 2,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(folder, sharded=name == "fsdp2", poisoned=poisoned))


def main(folder, *runs):
    warnings.filterwarnings("ignore")
    started_again = "LOCAL_RANK" in os.environ
    for run in runs:
        name, precision, *poisoned = run.split(":")
        if not (started_again and name in {"single", "ddp_spawn"}):
            fit(name, precision, Path(folder) / run.replace(":", "_"), poisoned=bool(poisoned))
    if torch.distributed.is_initialized():
        destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
