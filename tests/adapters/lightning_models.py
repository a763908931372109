"""Tiny models with known gradients, and a Trainer that prints nothing."""

from importlib import metadata

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader

AFTER_2_6 = Version(metadata.version("lightning")) >= Version("2.7.dev0")
"""Whether stock behaves as Lightning's development branch does since July 2026 (#21436, #21616)."""

QUIET = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*LeafSpec.*is deprecated",  # Lightning 2.6 on torch 2.13 triggers this
        ".*many workers.*",  # advice for larger data
        ".*ended before the epoch ended.*",  # tests resume in the middle of an epoch
        "the run has ended and no optimizer step was taken",  # many tests have one step, which overflows
    )
]


def stock(init_scale=2.0**16, growth_interval=2000, cls=MixedPrecision, **options):
    """Return Lightning's own plugin, in real fp16 on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, **options)
    return cls("16-mixed", "cpu", scaler=scaler)


def make_trainer(plugin, steps=1, **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return Trainer(plugins=None if plugin is None else [plugin], **{**defaults, **options})


def batches(count=64, value=3.0):
    """Return batches of one number each. With the loss ``w * x``, the gradient of ``w`` is that number."""
    return DataLoader([torch.as_tensor(value)] * count, batch_size=None)


def fit(module, plugin, steps=1, data=None, ckpt_path=None, **options):
    trainer = make_trainer(plugin, steps, **options)
    trainer.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer


def weight(value=1.0):
    return nn.Parameter(torch.tensor(float(value)))


class OneWeight(LightningModule):
    """Its loss is ``w * x``, and SGD has lr=1. So each step subtracts exactly the gradient that it gets."""

    def __init__(self, overflow_at=(), lr=1.0, none_at=(), fused=False, scheduler=None):
        super().__init__()
        self.w = weight()
        self.overflow_at, self.none_at, self.lr = overflow_at, none_at, lr
        self.fused, self.scheduler, self.lrs = fused, scheduler, []

    def training_step(self, batch, batch_idx):
        if batch_idx in self.none_at:
            return None
        loss = self.w * batch
        return loss * torch.inf if batch_idx in self.overflow_at else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, fused=self.fused)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"interval": "step", **self.scheduler(optimizer)}}

    def on_train_batch_end(self, *_):
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class TwoOptimizers(LightningModule):
    """Runs one backward pass for two optimizers, and records the gradients of each step.

    The step of ``a`` may overflow.
    """

    def __init__(self, overflow_a=False, step=None):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = weight(), weight()
        self.overflow_a, self.step, self.seen = overflow_a, step, []

    def training_step(self, batch, batch_idx):
        if self.step is not None:
            self.step(self, batch, batch_idx)
            return
        first, second = self.optimizers()
        first.zero_grad(), second.zero_grad()
        a = self.a * torch.inf if self.overflow_a else self.a
        self.manual_backward(batch * (a + self.b))
        before = self.a.item(), self.b.item()
        first.step()
        second.step()
        self.seen.append((before[0] - self.a.item(), before[1] - self.b.item()))

    def configure_optimizers(self):
        return torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)


class Linear(LightningModule):
    """A regression on random data, for comparing runs with each other."""

    def __init__(self, optimizer=torch.optim.AdamW, seed=0, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.make_optimizer, self.options = optimizer, {"lr": 1e-2, **options}
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), **self.options)


def regression(count=16, size=8, seed=1, repeat=False):
    """Return batches whose target is the sum of the inputs. With ``repeat`` all batches are the same."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size if repeat else count * size, 8, generator=generator)
    x = x.repeat(count, 1) if repeat else x
    y = x.sum(1, keepdim=True)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=size)
