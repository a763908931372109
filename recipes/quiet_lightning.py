"""A Trainer without its notes on devices, data loader workers and its own deprecated calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hold back what Lightning says about the machine and itself; other warnings pass."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for note in (".*does not have many workers.*", ".*LeafSpec.*is deprecated", ".*GPU available.*"):
            warnings.filterwarnings("ignore", message=note)
        try:
            yield
        finally:
            logger.setLevel(level)
