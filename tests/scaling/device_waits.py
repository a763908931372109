"""Whether the host waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise where the host waits for the device; switched off again whatever happens."""
    try:
        torch.cuda.set_sync_debug_mode("error")  # the first call of a process may warn when it is set already
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
