"""Compute on watched tensors without being watched, cast or recorded oneself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unwatched() -> Iterator[None]:
    """Run ops below every dispatch mode, tensor subclass and autocast region, without gradients."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableAutocast(), torch.no_grad():
        yield
