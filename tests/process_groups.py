"""Gloo process groups in tests: a group of this process alone, and how a process leaves its group.

Gloo's threads need the GIL to release Python objects of finished work. If the group is destroyed in the
meantime, the destructor waits for those threads with the GIL held, and hangs (torch 2.13,
``ProcessGroupGloo::~ProcessGroupGloo``).
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
    """Make a gloo group that has only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy()


def destroy() -> None:
    """Destroy the default process group once its threads have released all objects."""
    gc.collect()
    time.sleep(SECONDS_TO_DROP_WORK)  # releases the GIL
    dist.destroy_process_group()


def leave() -> NoReturn:
    """Destroy the group and end this process with status 0, without shutting down the interpreter.

    Gloo's threads can outlive ``destroy_process_group``, because DTensor's caches hold the group. A thread
    that releases its last tensor during shutdown may abort the process; see
    github.com/pytorch/pytorch/pull/179291.
    """
    destroy()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
