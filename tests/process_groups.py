"""Gloo's process groups in tests: of this process alone, and the end of one of several.

Gloo's threads need the GIL to drop what a finished work holds of Python's. Whoever destroys the group meanwhile
joins them with the GIL held, and hangs (torch 2.13, ``ProcessGroupGloo::~ProcessGroupGloo``).
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

SECONDS_TO_DROP_WORK = 0.1


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process the only one of a gloo group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy()


def destroy() -> None:
    """Destroy the default process group when its threads have nothing left to drop."""
    gc.collect()
    time.sleep(SECONDS_TO_DROP_WORK)  # without the GIL
    dist.destroy_process_group()


def leave() -> NoReturn:
    """Destroy the group and end this process with status 0, without tearing the interpreter down.

    Gloo's threads can outlive ``destroy_process_group``: DTensor's caches hold the group. A thread that drops
    its last tensor while the interpreter is torn down may abort the process, says
    github.com/pytorch/pytorch/pull/179291.
    """
    destroy()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
