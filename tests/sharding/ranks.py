"""What each of two or four processes does in test_ranks.py; writes FOLDER/rankN.json.

python -m torch.distributed.run --nproc-per-node 4 tests/sharding/ranks.py FOLDER [PART ...]
"""

import json
import sys
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


def main(folder, *chosen):
    warnings.simplefilter("ignore")
    PartialState._prepare_backend = on_cpu_as_on_gpus
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: None
    dist.init_process_group("gloo", timeout=timedelta(seconds=150))
    report = {}
    for name, part in parts.PARTS.items():
        if not chosen or name in chosen:
            start = time.perf_counter()
            try:
                report[name] = part(Path(folder))
            except Exception:  # noqa: BLE001 -- the test shows it, and the other parts go on
                report[name] = {"error": traceback.format_exc()}
            report.setdefault("seconds", {})[name] = time.perf_counter() - start
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
