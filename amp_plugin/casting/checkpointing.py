"""Carry a region's own rules into the recomputation of torch.utils.checkpoint."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from amp_plugin.casting import active
from amp_plugin.casting.region import autocast

if TYPE_CHECKING:
    from collections.abc import Iterator


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
    """Make the contexts that ``torch.utils.checkpoint`` enters in forward and recomputation.

    Checkpoint restores torch's autocast state by itself: enabled, dtype. A region opened with
    ``rules=`` needs this besides, in the non-reentrant form; default rules
    (``set_default_rules``) need nothing. The reentrant form takes no contexts and recomputes by
    the default rules: open a region with your rules inside the checkpointed function instead.

    Returns:
        A context for the forward pass, which does nothing, and one for the recomputation,
        which opens the innermost region of each device anew.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = checkpoint(torch.matmul, x, x, use_reentrant=False, context_fn=checkpoint_contexts)
    """
    return nullcontext(), _opened_again(_open_regions())


def _open_regions() -> list[autocast]:
    """Copy the innermost region of each device in this thread."""
    if active.native_enter is None:
        return []
    devices = {number: name for name, number in active.DEVICE_NUMBERS.items()}
    flat = torch.ops.amp_plugin._innermost_regions()
    copies = []
    for number, rules, cache_enabled in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        device = devices[number]
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        copy = autocast(device, dtype, enabled, bool(cache_enabled))
        copy._rules_number = rules
        copies.append(copy)
    return copies


@contextmanager
def _opened_again(regions: list[autocast]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            stack.enter_context(region)
        yield
