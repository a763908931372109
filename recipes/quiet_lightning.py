"""Silence what Lightning logs about the machine and about itself."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence notes on devices, data loader workers and deprecated calls of Lightning's own."""
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
