"""Forget cast weights after a write that no version counter shows."""

from __future__ import annotations

from amp_plugin.casting.autocast_kernels import KERNELS


def invalidate() -> None:
    """Forget every cast weight, in every thread.

    Call it after writing to weights outside a region behind autograd's back, such as
    ``p.data.copy_(ema)`` by a kernel of your own. Optimizer steps do it by themselves. In code that
    ``torch.compile`` compiles the call is part of the graph.
    """
    KERNELS.invalidate()
