"""The program of test_ranks.py, for four processes and then two. Each writes FOLDER/rankN-of-M.json.

``launch`` runs in a process that has imported the frameworks, and forks the ranks from it.
"""

import json
import os
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState

from tests.adapters.accelerate_ranks import on_cpu_as_on_gpus
from tests.process_groups import leave
from tests.sharding import parts

OF_TWO = ("collectives", "resume")  # runs after the four, with their checkpoint
OF_FOUR = tuple(part for part in parts.PARTS if part != "resume")


def launch(folder, whole):
    """Run all checks, or a few, on four ranks and then on two."""
    for count, chosen in ((4, OF_FOUR), (2, OF_TWO)):
        ended = fork_ranks(count, Path(folder), chosen, whole)
        if any(ended):
            raise SystemExit(f"{count} ranks ended with {ended}")


def fork_ranks(count, folder, chosen, whole):
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, count, folder, chosen, whole)
            except BaseException:  # noqa: BLE001 -- told, and no code of the parent runs here
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def run_rank(rank, count, folder, chosen, whole):
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
    PartialState._prepare_backend = on_cpu_as_on_gpus
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: None
    store = f"file://{folder}/store-of-{count}"
    timeout = timedelta(seconds=150)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timeout)
    report = {"seconds": {}}
    for name in chosen:
        start = time.perf_counter()
        try:
            report[name] = parts.PARTS[name](folder, whole)
        except Exception:  # noqa: BLE001 -- the test shows it, and the other parts go on
            report[name] = {"error": traceback.format_exc()}
        report["seconds"][name] = time.perf_counter() - start
    (folder / f"rank{rank}-of-{count}.json").write_text(json.dumps(report))
    leave()
