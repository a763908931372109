"""The program of test_elastic.py: torchrun's elastic launcher, and a training run that resumes."""

import json
import os
import shutil
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from amp_plugin import GradScaler, autocast, fully_shard
from tests.process_groups import destroy
from tests.sharding.checkpoints import SCALING, SHARES, micro_batches, own_shares
from tests.sharding.models import Net, flat, loss_of, optimizer_of, plan

END, SAVED_EVERY, KILLED_AT = 8, 2, 5  # in step 5, the newest checkpoint has 4 steps


def launch(folder, ranks, kind=None, *, restarts=0, killed=False, end=END):
    """Run torchrun's agent with forked ranks. Return whether all ranks finished."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=f"{Path(folder).name}-{ranks}",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, train)(folder, kind or Run, killed, end)
    except ChildFailedError:
        return False
    return True


class Run:
    """A small fp16 run under DDP. Its loss scale changes at step 1, which is poisoned, and later."""

    precision = torch.float16

    def __init__(self, folder):
        self.folder, self.model = folder, DistributedDataParallel(Net())
        self.optimizer = optimizer_of(self.model.parameters())
        self.scaler = GradScaler("cpu", **SCALING)

    def step(self, step):
        """Take a step. Return the mean loss over all parts of the data."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for share, is_last, factor in micro_batches(step):
            self.add_up_only(not is_last)
            with autocast("cpu", dtype=self.precision):
                loss = loss_of(self.model, step, share, factor)
            self.scaler.scale(loss / len(own_shares())).backward()
            total += loss.detach() / SHARES
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dist.all_reduce(total)
        return total.item()

    def add_up_only(self, is_wanted):
        """Choose whether the next backward pass only adds to the gradients or reduces them too."""
        self.model.require_backward_grad_sync = not is_wanted

    def save(self, steps):
        """Write a checkpoint, then write its number into the file ``newest``."""
        self.write(self.folder / f"after-{steps}")
        if dist.get_rank() == 0:
            (self.folder / "newest").write_text(str(steps))
        dist.barrier()

    def load(self):
        """Load the newest checkpoint. Return the number of steps it has."""
        newest = self.folder / "newest"
        if not newest.exists():
            return 0
        self.read(self.folder / f"after-{newest.read_text()}")
        return int(newest.read_text())

    def write(self, path):
        if dist.get_rank() == 0:
            torch.save([part.state_dict() for part in (self.model, self.optimizer, self.scaler)], path)

    def read(self, path):
        for part, state in zip((self.model, self.optimizer, self.scaler), torch.load(path), strict=True):
            part.load_state_dict(state)

    def weights(self):
        return flat(self.model).tolist()


class ShardedRun(Run):
    """A small bf16 run under FSDP2, saved by torch.distributed.checkpoint. Its shards may be pairs."""

    precision, stored = torch.bfloat16, "fp32"

    def __init__(self, folder):
        self.folder, self.model = folder, Net()
        fully_shard(self.model, replace(plan(), weights=self.stored), units=self.model.blocks)
        self.optimizer = optimizer_of(self.model.parameters())
        self.scaler = GradScaler("cpu", enabled=False)

    def add_up_only(self, is_wanted):
        self.model.set_requires_gradient_sync(not is_wanted)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def write(self, path):
        dcp.save(self.state(), checkpoint_id=path)

    def read(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class StoredRun(ShardedRun):
    stored = "bf16"


def train(folder, kind, killed, end):
    """Train on one rank, starting from the newest checkpoint.

    In the first attempt the last rank may be killed.
    """
    # the fork inherited the agent's handler, which runs only when Python does
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(attempt, store)  # the agent's store still has the addresses of killed ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    run = kind(Path(folder))
    for step in range(run.load(), end):
        if killed and attempt == "0" and step == KILLED_AT and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = run.step(step)
        seen = [step, loss, run.scaler.get_scale(), run.scaler.skipped_steps()]
        if dist.get_rank() == 0:
            with (run.folder / "seen").open("a") as file:
                file.write(json.dumps(seen) + "\n")
        if (step + 1) % SAVED_EVERY == 0:
            run.save(step + 1)
    weights = run.weights()
    if dist.get_rank() == 0:
        (run.folder / f"weights of {dist.get_world_size()} ranks").write_text(json.dumps(weights))
    dist.barrier()
    destroy()


def of_whole_models(folder):
    """Train without interruption, with a restart after a failure, and with one rank resuming after a failure."""
    for name in ("unbroken", "restarted", "fewer", "fewer, unbroken"):
        (folder / name).mkdir()
    return [
        launch(folder / "unbroken", 2),
        launch(folder / "restarted", 2, restarts=1, killed=True),
        launch(folder / "fewer", 2, killed=True),
        launch(folder / "fewer", 1),
        launch(folder / "fewer, unbroken", 2, end=KILLED_AT - 1),
        launch(folder / "fewer, unbroken", 1),
    ]


def of_stored_shards(folder):
    """Kill one of four ranks with stored shards. Two ranks resume, with pairs and with float32 shards."""
    for name in ("stored", "stored, unbroken", "never stored"):
        (folder / name).mkdir()
    has_finished = launch(folder / "stored", 4, StoredRun, killed=True)
    shutil.copytree(folder / "stored", folder / "stored, resumed in fp32")
    return [
        has_finished,
        launch(folder / "stored", 2, StoredRun),
        launch(folder / "stored, resumed in fp32", 2, ShardedRun),
        launch(folder / "stored, unbroken", 4, StoredRun, end=KILLED_AT - 1),
        launch(folder / "stored, unbroken", 2, StoredRun),
        launch(folder / "never stored", 4, ShardedRun, end=KILLED_AT - 1),
        launch(folder / "never stored", 2, ShardedRun),
    ]


PROGRAMS = {"whole models": of_whole_models, "stored shards": of_stored_shards}


def main(folder, program):
    """Run a program. Write whether all ranks of each of its launches finished."""
    (Path(folder) / "ended").write_text(json.dumps(PROGRAMS[program](Path(folder))))
