"""Which of several processes this one is."""

from __future__ import annotations

import os

import torch


def rank_of_process() -> int | None:
    """Return the rank in the process group, or the launcher's; None where there is one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else None
