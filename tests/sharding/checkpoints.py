"""Four ranks save a run in the checkpoints of each entry point, and two ranks resume it.

The data has four parts. Each rank has one part, or two of them as micro-batches of a window.
"""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from amp_plugin import AmpPrecision, FabricAmpPrecision, GradScaler, autocast, fully_shard
from tests.sharding.fronts import FabricOnCpu, OnCpu, accelerator_of, shard, whole_weights
from tests.sharding.models import DTYPES, IN_FP32, Net, loss_of, optimizer_of, plan

# Accelerate keeps counting micro-batches after a resume, so there are two windows of two
SHARES, SAVED_AT, END = 4, 4, 8
POISONED = 1  # this step is skipped, before the run is saved
SCALING = {"init_scale": 2.0**10, "growth_interval": 3}


def options_of(strategy):
    """Return options.

    FSDP1 gathers 16 bits only if no module stays in fp32; gradients are still added in fp32.
    """
    return {"fp32_modules": () if strategy == "fsdp1" else IN_FP32, **SCALING, **stored_by(strategy)}


def stored_by(strategy):
    """Return the option for FSDP2 with weights stored in 16 bits, or nothing."""
    return {"weights": "fp16"} if strategy == "stored" else {}


def own_shares():
    return range(dist.get_rank(), SHARES, dist.get_world_size())


def micro_batches(step):
    """Yield this rank's micro-batches, whether each one is the last, and a factor that may overflow."""
    shares = own_shares()
    for share in shares:
        yield share, share == shares[-1], torch.inf if (step, share) == (POISONED, SHARES - 1) else 0.0


def result(losses, steps, scaler, weights):
    total = torch.stack(losses[-steps * len(own_shares()) :]) / SHARES
    dist.all_reduce(total)
    return {
        "losses": total.view(steps, -1).sum(1).tolist(),
        "end": scaler.get_scale(),
        "weights": weights.tolist(),
    }


class Keeper:
    """A run that can ``train`` some steps, ``write`` a checkpoint and ``read`` it."""

    def save(self):
        before = self.train(range(SAVED_AT))["weights"]
        self.write()
        return {"saved": before, "scale": self.scaler.get_scale(), **self.train(range(SAVED_AT, END))}

    def resume(self):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.read()
        model = getattr(self.model, "_forward_module", self.model)
        loaded = {"told": [str(warning.message) for warning in told], "scale": self.scaler.get_scale()}
        loaded["loaded"] = whole_weights(model, self.net).tolist()
        return {**loaded, **self.train(range(SAVED_AT, END))}


class ByHand(Keeper):
    """A plain training loop with torch.distributed.checkpoint."""

    def __init__(self, folder, strategy):
        self.path = folder / f"by hand {strategy}"
        self.net = Net()
        self.model = fully_shard(self.net, plan("fp16"), units=self.net.blocks)
        self.optimizer = optimizer_of(self.net.parameters())
        self.scaler = GradScaler("cpu", **SCALING)

    def train(self, steps):
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            for share, is_last, factor in micro_batches(step):
                self.net.set_requires_gradient_sync(is_last)
                with autocast("cpu", dtype=DTYPES["fp16"]):
                    loss = loss_of(self.net, step, share, factor)
                self.scaler.scale(loss / len(own_shares())).backward()
                losses.append(loss.detach())
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return result(losses, len(steps), self.scaler, whole_weights(self.net, self.net))

    def state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def write(self):
        dcp.save(self.state(), checkpoint_id=self.path)

    def read(self):
        state = self.state()
        dcp.load(state, checkpoint_id=self.path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.net, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scaler.load_state_dict(state["scaler"])


class Module(LightningModule):
    """One epoch is one accumulation window. So runs with 2 and with 4 ranks have equal epochs."""

    def __init__(self, strategy):
        super().__init__()
        self.net, self.strategy, self.losses, self.scale = Net(), strategy, [], None

    def configure_model(self):
        if self.strategy != "fsdp1" and not hasattr(self.net, "unshard"):
            shard(self.net, self.trainer.precision_plugin.dtype_plan, "fsdp2")

    def training_step(self, batch, index):
        step = self.current_epoch
        share, _, factor = [*micro_batches(step)][index]
        loss = loss_of(self.net, step, share, factor)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return optimizer_of(self.trainer.model.parameters())

    def on_train_epoch_start(self):
        if self.current_epoch == SAVED_AT:
            self.scale = self.trainer.precision_plugin.scaler.get_scale()

    def on_train_end(self):
        weights, scaler = whole_weights(self.trainer.model, self.net), self.trainer.precision_plugin.scaler
        self.result = {"scale": self.scale, **result(self.losses, END - SAVED_AT, scaler, weights)}


class ByTrainer:
    """The Trainer's own checkpoints: one file per rank."""

    def __init__(self, folder, strategy, saved_by=None):
        self.path, self.module = folder / f"trainer {saved_by or strategy}", Module(strategy)

    def fit(self, checkpoint=None):
        backend = {"process_group_backend": "gloo"}
        if self.module.strategy == "fsdp1":
            strategy = OnCpu(use_orig_params=True, state_dict_type="sharded", **backend)
        else:
            strategy = ModelParallelStrategy(dist.get_world_size(), 1, **backend)
        saves = ModelCheckpoint(
            self.path, "{epoch}", every_n_epochs=SAVED_AT, save_on_train_epoch_end=True, save_top_k=-1
        )
        windows = len(own_shares())
        Trainer(
            strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_epochs=END, logger=False,
            accumulate_grad_batches=windows, use_distributed_sampler=False, callbacks=[saves],
            plugins=[AmpPrecision("fp16", **options_of(self.module.strategy))], enable_progress_bar=False, enable_model_summary=False,
        ).fit(self.module, torch.utils.data.DataLoader(range(windows)), ckpt_path=checkpoint)  # fmt: skip
        return self.module.result

    def save(self):
        return self.fit()

    def resume(self):
        return self.fit(self.path / f"epoch={SAVED_AT - 1}.ckpt")


class ByFabric(Keeper):
    """Fabric's own checkpoints: one file per rank."""

    def __init__(self, folder, strategy, saved_by=None):
        self.path = folder / f"fabric {saved_by or strategy}"
        self.plugin = FabricAmpPrecision("fp16", **options_of(strategy))
        self.scaler = self.plugin.scaler
        backend = {"process_group_backend": "gloo"}
        if strategy == "fsdp1":
            way = FabricOnCpu(use_orig_params=True, state_dict_type="sharded", **backend)
        else:

            def parallelize(net, mesh):
                return shard(net, self.plugin.dtype_plan, "fsdp2")

            way = FabricModelParallelStrategy(parallelize, dist.get_world_size(), 1, **backend)
        self.fabric = Fabric(
            strategy=way, accelerator="cpu", devices=dist.get_world_size(), plugins=self.plugin
        )
        self.fabric.launch()
        self.net = Net()
        self.model = self.fabric.setup_module(self.net)
        self.optimizer = self.fabric.setup_optimizers(optimizer_of(self.model.parameters()))

    def train(self, steps):
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            for share, is_last, factor in micro_batches(step):
                with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                    loss = loss_of(self.model, step, share, factor)
                    self.fabric.backward(loss / len(own_shares()))
                losses.append(loss.detach())
            self.optimizer.step()
        weights = whole_weights(self.model._forward_module, self.net)
        return result(losses, len(steps), self.scaler, weights)

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "precision": self.plugin}

    def write(self):
        self.fabric.save(self.path, self.state())

    def read(self):
        state = self.state()
        self.fabric.load(self.path, state)
        # sharded strategies return the saved state instead of loading it
        if state["precision"] is not self.plugin:
            self.plugin.load_state_dict(state["precision"])


class ByAccelerate(Keeper):
    """Accelerate's own checkpoints: one file per rank, because FSDP1's single file does not work on CPUs."""

    def __init__(self, folder, strategy, saved_by=None):
        self.path = folder / f"accelerate {saved_by or strategy}"
        self.accelerator = accelerator_of(
            strategy.replace("stored", "fsdp2"),
            "fp16",
            state_dict_type="SHARDED_STATE_DICT",
            micro_batches=len(own_shares()),
            **SCALING,
            **stored_by(strategy),
        )
        self.net = Net()
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer_of(self.net.parameters()))
        self.scaler = self.accelerator.scaler

    def train(self, steps):
        losses = []
        for step in steps:
            for share, _, factor in micro_batches(step):
                with self.accelerator.accumulate(self.model):
                    loss = loss_of(self.model, step, share, factor)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.detach())
        return result(losses, len(steps), self.scaler, whole_weights(self.model, self.net))

    def write(self):
        self.accelerator.save_state(str(self.path))

    def read(self):
        self.accelerator.load_state(str(self.path))


KEEPERS = {
    "by hand fsdp2": (ByHand, "fsdp2"),
    **{
        f"{name} {strategy}": (kind, strategy)
        for name, kind in (("trainer", ByTrainer), ("fabric", ByFabric), ("accelerate", ByAccelerate))
        for strategy in ("fsdp1", "fsdp2", "stored")
    },
}


# Float32 runs that load the checkpoints of stored ones, and the other way round.
CROSSED = {
    f"{name} {saved_by}, into {strategy}": (kind, strategy, saved_by)
    for name, kind in (("trainer", ByTrainer), ("fabric", ByFabric), ("accelerate", ByAccelerate))
    for strategy, saved_by in (("fsdp2", "stored"), ("stored", "fsdp2"))
}


# Few runs save and load under each entry point, with each kind of shards, and cross in both directions.
FEW_KEEPERS = (
    "by hand fsdp2",
    "trainer fsdp1",
    "trainer stored",
    "fabric fsdp2",
    "accelerate fsdp1",
    "accelerate stored",
)
FEW_CROSSED = ("trainer stored, into fsdp2", "fabric fsdp2, into stored")


def keepers_of(whole):
    """Return the names of all runs that are saved and resumed, or of a few."""
    return [*KEEPERS] if whole else FEW_KEEPERS


def crossed_of(whole):
    """Return the names of all runs that load a checkpoint of the other kind, or of a few."""
    return [*CROSSED] if whole else FEW_CROSSED


def save(folder, whole):
    report = {}
    for name in keepers_of(whole):
        kind, strategy = KEEPERS[name]
        report[name] = kind(folder, strategy).save()
    return report


def resume(folder, whole):
    report = {}
    for name in (*keepers_of(whole), *crossed_of(whole)):
        kind, *options = {**KEEPERS, **CROSSED}[name]
        report[name] = kind(folder, *options).resume()
    return report
