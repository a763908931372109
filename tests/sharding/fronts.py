"""A few steps of a sharded model in each entry point: plain loop, Trainer, Fabric, Accelerate.

Each function trains on this rank's part of the data and returns a Run. In step ``poison``, the gradient of
one element is infinite on the last rank. ``log`` is a log of collectives that is being written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_plugin import AmpKwargs, AmpPrecision, FabricAmpPrecision, GradScaler, autocast, fully_shard
from amp_plugin.adapters.accelerate import AmpAccelerator
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.precision import short_name
from amp_plugin.sharding.fully_shard import add_up_in_fp32, fsdp1_policy
from amp_plugin.sharding.report import shard_units
from amp_plugin.weights.weight import half_of
from tests.adapters.accelerate_pair import reset
from tests.sharding.models import DTYPES, IN_FP32, STEPS, Net, flat, loss_of, optimizer_of, plan

CPU = torch.device("cpu")
IN_PARALLEL = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
# Tensor parallelism adds activations in the dtype in which they were computed. The patterns match in any
# model.
FP32_IN_PARALLEL = (*IN_FP32, "*.up", "*.down")
STRATEGIES = ("fsdp1", "fsdp2", "hsdp", "tp")
SCALE = 2.0**10


@dataclass
class Run:
    losses: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    weights: torch.Tensor = None
    scale: float = 1.0
    units: list = field(default_factory=list)
    stored: dict = field(default_factory=dict)  # the dtype in which each weight is stored
    log: Sequence = ()
    ends: list = field(default_factory=list)

    def add(self, loss, skipped):
        """Mark the end of a step in the log."""
        self.losses.append(loss.detach().clone())
        self.skipped.append(bool(skipped))
        self.ends.append(len(self.log))

    def end(self, model, net, scaler):
        self.weights = whole_weights(model, net)
        self.scale = scaler.get_scale() if scaler is not None else 1.0
        self.units = shard_units(model if isinstance(model, FullyShardedDataParallel) else net)
        self.stored = {name: short_name(half_of(param).dtype) for name, param in net.named_parameters()}

    def collectives_of_last_step(self):
        start, end = self.ends[-2:]
        return list(self.log)[start:end]

    def mean_losses(self):
        mean = torch.stack(self.losses) / dist.get_world_size()
        dist.all_reduce(mean)
        return mean


def fp32_modules_of(strategy):
    return FP32_IN_PARALLEL if strategy == "tp" else IN_FP32


def options_of(strategy, given):
    return {"fp32_modules": fp32_modules_of(strategy), "init_scale": SCALE, **given}


def meshes(strategy):
    """Return the mesh of all ranks, and the part of it that FSDP uses."""
    ranks = dist.get_world_size()
    if strategy == "fsdp2":
        return None, init_device_mesh("cpu", (ranks,))
    both = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    return both, both["data_parallel"] if strategy == "tp" else both


def share_of(strategy):
    """Return this rank's rows. Under tensor parallelism, two ranks have the same rows."""
    ranks = dist.get_world_size()
    return dist.get_rank() // (ranks // 2) if strategy == "tp" else dist.get_rank()


def shares(strategy, ranks):
    return 2 if strategy == "tp" else ranks


def shard(net, dtypes, strategy, both=None, mesh=None):
    if mesh is None:
        both, mesh = meshes(strategy)
    if strategy == "tp":
        parallelize_module(net, both["tensor_parallel"], IN_PARALLEL)
    return fully_shard(net, dtypes, units=net.blocks, mesh=mesh)


def factor_of(step, poison):
    """Return the factor of a step: infinite on the last rank in the poisoned step, else 0. None if no step is
    poisoned.
    """
    if poison is None:
        return None
    return torch.inf if step == poison and dist.get_rank() == dist.get_world_size() - 1 else 0.0


def whole_weights(model, net):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return flat(net)
    return flat(net)


def wrap(net, policy, **options):
    return FullyShardedDataParallel(
        net, mixed_precision=policy, use_orig_params=True, device_id=CPU, **options
    )


def plain(strategy, precision="bf16", *, fused=False, steps=STEPS, poison=None, log=(), **options):
    dtypes, net = replace(plan(precision, fp32_modules_of(strategy)), **options), Net()
    if strategy == "fsdp1":
        apply_fp32_modules(net, dtypes.fp32_modules)
        model = wrap(net, fsdp1_policy(dtypes))
        add_up_in_fp32(model)
    else:
        model = shard(net, dtypes, strategy)
    optimizer = optimizer_of(model.parameters(), fused=fused)
    groups = {"sharded_groups": [dist.group.WORLD]} if strategy == "fsdp1" else {}
    scaler = GradScaler("cpu", init_scale=SCALE, enabled=precision == "fp16", **groups)
    run = Run(log=log)
    for step in range(steps):
        optimizer.zero_grad()
        with autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32"):
            loss = loss_of(model, step, share_of(strategy), factor_of(step, poison))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.add(loss, scaler.last_step(optimizer).skipped)
    run.end(model, net, scaler)
    return run


class OnCpu(FSDPStrategy):
    """Lets Lightning use FSDP1 on CPUs, although it supports it on GPUs only."""

    def _setup_model(self, model):
        return wrap(model, self.mixed_precision_config)


class FabricOnCpu(FabricFSDPStrategy):
    def setup_module(self, module):
        return wrap(module, self.mixed_precision_config)


class Module(LightningModule):
    def __init__(self, strategy, fused, poison, run):
        super().__init__()
        self.net, self.strategy, self.fused, self.poison, self.run = Net(), strategy, fused, poison, run

    def configure_model(self):
        if self.strategy != "fsdp1" and not hasattr(self.net, "unshard"):
            dtypes = self.trainer.precision_plugin.dtype_plan
            if self.strategy == "tp":
                mesh = self.device_mesh
                shard(self.net, dtypes, "tp", mesh, mesh["data_parallel"])
            else:
                shard(self.net, dtypes, self.strategy)

    def training_step(self, step, _):
        self.loss = loss_of(self.net, int(step), share_of(self.strategy), factor_of(int(step), self.poison))
        return self.loss

    def on_train_batch_end(self, *_):
        plugin, (optimizer,) = self.trainer.precision_plugin, self.trainer.optimizers
        self.run.add(self.loss, plugin.last_step(optimizer).skipped)

    def configure_optimizers(self):
        return optimizer_of(self.trainer.model.parameters(), fused=self.fused)

    def on_train_end(self):
        self.run.end(self.trainer.model, self.net, self.trainer.precision_plugin.scaler)


def trainer(strategy, precision="bf16", *, fused=False, steps=STEPS, poison=None, log=(), **options):
    ranks = dist.get_world_size()
    if strategy == "fsdp1":
        way = OnCpu(use_orig_params=True, process_group_backend="gloo")
    else:
        parallel = ranks // 2 if strategy == "tp" else 1
        way = ModelParallelStrategy(ranks // parallel, parallel, process_group_backend="gloo")
    module = Module(strategy, fused, poison, Run(log=log))
    Trainer(
        strategy=way, accelerator="cpu", devices=ranks, max_steps=steps, logger=False, use_distributed_sampler=False,
        plugins=[AmpPrecision(precision, **options_of(strategy, options))],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(range(steps)))  # fmt: skip
    return module.run


def fabric(strategy, precision="bf16", *, fused=False, steps=STEPS, poison=None, log=(), **options):
    ranks = dist.get_world_size()
    plugin = FabricAmpPrecision(precision, **options_of(strategy, options))
    if strategy == "fsdp1":
        way = FabricOnCpu(use_orig_params=True, process_group_backend="gloo")
    else:
        parallel = ranks // 2 if strategy == "tp" else 1

        def parallelize(net, mesh):
            own = (mesh, mesh["data_parallel"]) if strategy == "tp" else ()
            return shard(net, plugin.dtype_plan, strategy, *own)

        way = FabricModelParallelStrategy(
            parallelize, ranks // parallel, parallel, process_group_backend="gloo"
        )
    frame = Fabric(strategy=way, accelerator="cpu", devices=ranks, plugins=plugin)
    frame.launch()
    net = Net()
    model = frame.setup_module(net)
    optimizer = frame.setup_optimizers(optimizer_of(model.parameters(), fused=fused))
    run = Run(log=log)
    for loss in steps_of(model, optimizer, strategy, steps, poison, frame.backward):
        run.add(loss, plugin.last_step(optimizer).skipped)
    run.end(model._forward_module, net, plugin.scaler)
    return run


def steps_of(model, optimizer, strategy, steps, poison, backward):
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, share_of(strategy), factor_of(step, poison))
        backward(loss)
        optimizer.step()
        yield loss


def accelerator_of(strategy, precision, *, micro_batches=1, state_dict_type=None, **options):
    reset()
    by_block = strategy in {"fsdp2", "hsdp"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if strategy == "fsdp1" else 2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP" if by_block else "NO_WRAP",
        transformer_cls_names_to_wrap=["Block"] if by_block else None,
        cpu_ram_efficient_loading=False,
        use_orig_params=True if strategy == "fsdp1" else None,
        state_dict_type=state_dict_type,
    )
    replicated = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)
    return AmpAccelerator(
        parallelism_config=replicated if strategy == "hsdp" else None,
        mixed_precision=precision if precision != "fp32" else "no",
        fsdp_plugin=plugin,
        gradient_accumulation_steps=micro_batches,
        kwargs_handlers=[AmpKwargs(**options_of(strategy, options))],
    )


def accelerate(strategy, precision="bf16", *, fused=False, steps=STEPS, poison=None, log=(), **options):
    """Train with Accelerate.

    Tensor parallelism is set up before ``prepare``, which does not change shards.
    """
    accelerator = accelerator_of(strategy, precision, **options)
    net = Net()
    if strategy == "tp":
        shard(net, accelerator.dtype_plan, strategy)
    model, optimizer = accelerator.prepare(net, optimizer_of(net.parameters(), fused=fused))
    run = Run(log=log)
    for loss in steps_of(model, optimizer, strategy, steps, poison, accelerator.backward):
        run.add(loss, accelerator.optimizer_step_was_skipped)
    run.end(model, net, accelerator.scaler)
    return run


FRONTS = {"plain": plain, "trainer": trainer, "fabric": fabric, "accelerate": accelerate}
