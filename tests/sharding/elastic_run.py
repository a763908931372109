"""The program of test_elastic.py: torchrun's elastic launcher, and a training run that resumes."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from amp_plugin import GradScaler, autocast
from tests.process_groups import destroy
from tests.sharding.checkpoints import SCALING, SHARES, micro_batches, own_shares
from tests.sharding.models import Net, loss_of, optimizer_of

END, SAVED_EVERY, KILLED_AT = 8, 2, 5  # in step 5, the newest checkpoint has 4 steps


def launch(folder, ranks, *, restarts=0, killed=False, end=END):
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
        elastic_launch(config, train)(folder, killed, end)
    except ChildFailedError:
        return False
    return True


class Run:
    """A small fp16 run under DDP. Its loss scale changes at step 1, which is poisoned, and later."""

    def __init__(self, folder):
        self.folder, self.model = folder, DistributedDataParallel(Net())
        self.optimizer = optimizer_of(self.model.parameters())
        self.scaler = GradScaler("cpu", **SCALING)

    def step(self, step):
        """Take a step. Return the mean loss over all parts of the data."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for share, is_last, factor in micro_batches(step):
            self.model.require_backward_grad_sync = is_last
            with autocast("cpu", dtype=torch.float16):
                loss = loss_of(self.model, step, share, factor)
            self.scaler.scale(loss / len(own_shares())).backward()
            total += loss.detach() / SHARES
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dist.all_reduce(total)
        return total.item()

    def save(self, steps):
        """Write a checkpoint, then write its number into the file ``newest``."""
        if dist.get_rank() == 0:
            states = [part.state_dict() for part in (self.model, self.optimizer, self.scaler)]
            torch.save(states, self.folder / f"after-{steps}")
            (self.folder / "newest").write_text(str(steps))
        dist.barrier()

    def load(self):
        """Load the newest checkpoint. Return the number of steps it has."""
        newest = self.folder / "newest"
        if not newest.exists():
            return 0
        states = torch.load(self.folder / f"after-{newest.read_text()}")
        for part, state in zip((self.model, self.optimizer, self.scaler), states, strict=True):
            part.load_state_dict(state)
        return int(newest.read_text())


def train(folder, killed, end):
    """Train on one rank, starting from the newest checkpoint.

    In the first attempt the last rank may be killed.
    """
    # the fork inherited the agent's handler, which runs only when Python does
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(attempt, store)  # the agent's store still has the addresses of killed ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    run = Run(Path(folder))
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
    dist.barrier()
    destroy()


def main(folder):
    """Train without interruption, with a restart after a failure, and with one rank resuming after a failure."""
    folder = Path(folder)
    for name in ("unbroken", "restarted", "fewer", "fewer, unbroken"):
        (folder / name).mkdir()
    ended = [
        launch(folder / "unbroken", 2),
        launch(folder / "restarted", 2, restarts=1, killed=True),
        launch(folder / "fewer", 2, killed=True),
        launch(folder / "fewer", 1),
        launch(folder / "fewer, unbroken", 2, end=KILLED_AT - 1),
        launch(folder / "fewer, unbroken", 1),
    ]
    (folder / "ended").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
