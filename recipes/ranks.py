"""Run a function on several processes, as torchrun does, in one process group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Config = TypeVar("Config")
Result = TypeVar("Result")


def on_ranks(function: Callable[[Config], Result], config: Config, processes: int) -> Result:
    """Call a function on several processes and return the result of rank 0.

    Under torchrun the processes are there already: the function is called here, and its result returned.

    Args:
        function: what each process calls; defined at the top of a module.
        config: its argument.
        processes: how many to start; 1: run in this process. Not used under torchrun.
    """
    if "RANK" in os.environ or processes == 1:
        return function(config)
    launch = LaunchConfig(
        run_id="recipe",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="spawn",
        max_restarts=0,
    )
    return elastic_launch(launch, function)(config)[0]  # type: ignore[no-any-return]


@contextmanager
def process_group(device: str) -> Iterator[tuple[int, int]]:
    """Join the process group, gloo on the CPU and nccl on GPUs; yield rank and number of ranks.

    Args:
        device: device type of the tensors.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
        if backend == "gloo":
            dist.barrier()
            # gloo's threads need the GIL to drop their last work, and destroy_process_group holds it while it
            # waits for them: give them time before.
            time.sleep(0.1)
    finally:
        dist.destroy_process_group()
