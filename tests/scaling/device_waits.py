"""Detects whether the host waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise an error if the host waits for the device. The check is turned off again in any case."""
    try:
        # the first call in a process may warn about the setting itself
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
