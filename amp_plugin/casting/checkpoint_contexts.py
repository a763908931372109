"""Carry a region's own rules into the recomputation of torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from amp_plugin.casting.region_state import RegionState, current_state, has_region


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
        >>> import torch
        >>> from amp_plugin import autocast
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     y = checkpoint(torch.matmul, x, x, use_reentrant=False, context_fn=checkpoint_contexts)
    """
    return nullcontext(), _opened_again(current_state() if has_region() else ())


@contextmanager
def _opened_again(states: tuple[RegionState, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.region())
        yield
