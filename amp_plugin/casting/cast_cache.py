"""Cast weights kept over an accumulation window."""

from __future__ import annotations

import amp_plugin.kernels.ops  # noqa: F401 - defines the multi-tensor cast
from amp_plugin.casting.autocast_kernels import KERNELS
from amp_plugin.kernels.build import require_native


class CastCache:
    """Keep the casts of weights from micro-batch to micro-batch.

    Without it a region casts every fp32 weight once per micro-batch. With it a weight is
    cast once per window, into a buffer that lives as long as this object: after an optimizer
    step all stale buffers are refreshed by one multi-tensor cast. Every region hangs an
    autograd node of its own on the buffer, so gradients add up in fp32 as without the cache; with
    ``cache_enabled=False`` every use of a weight in a region does.

    Memory: 2 bytes per element of each fp32 parameter that is cast to fp16 or bf16, until
    ``clear()``; twice that for weights whose last graph is still alive at a refresh. No reference to a
    weight is held. Eager only: inside compiled code, under tracing, functorch transforms, CUDA
    graph capture and for parameters that FSDP manages nothing is kept.

    Buffers follow in-place and ``.data`` updates made by torch's optimizers, fused and compiled ones
    included, swaps of ``.data`` and ``load_state_dict``. After a step was captured in a CUDA graph casts
    are kept for one region only. A write outside any region by code that moves no version counter is
    invisible: call ``invalidate()``. Or own the window: call ``end_window()`` at each end.

    Raises:
        RuntimeError: there is no native core.

    Example:
        >>> cache = CastCache()
        >>> model, data = torch.nn.Linear(8, 2), torch.ones(4, 8)
        >>> for micro_batch in data.split(2):
        ...     with autocast("cpu", dtype=torch.bfloat16, cache=cache):
        ...         loss = model(micro_batch).sum()
        ...     loss.backward()
        >>> cache.casts
        2
    """

    def __init__(self) -> None:
        region = require_native("CastCache").region
        if region is None:
            msg = "CastCache needs the native core's region extension"
            raise RuntimeError(msg)
        KERNELS.install()  # steps are watched from now on
        self._region = region
        self.handle = region.new_casts()

    def clear(self) -> None:
        """Free the buffers; graphs that still need one keep it alive."""
        self._region.clear_casts(self.handle)

    def end_window(self) -> None:
        """Say that an accumulation window ends: weights may have changed, however that came about.

        For whoever owns the training loop, at the end of every window, after the optimizer's step. Every
        window then casts each weight once, whether or not a hook saw the step. From the first call on
        the cache relies on being told: it keeps casts over regions where steps are replayed from a CUDA
        graph as well.
        """
        self._region.end_window(self.handle)

    @property
    def nbytes(self) -> int:
        """Bytes held in buffers."""
        return int(self._region.count_casts(self.handle)[1])

    @property
    def casts(self) -> int:
        """Weights cast so far; stays the same while buffers are reused."""
        return int(self._region.count_casts(self.handle)[2])

    @property
    def refreshes(self) -> int:
        """Multi-tensor casts so far, at most one per optimizer step once all weights are known."""
        return int(self._region.count_casts(self.handle)[3])

    def __len__(self) -> int:
        """Return the number of buffers."""
        return int(self._region.count_casts(self.handle)[0])

    def __repr__(self) -> str:
        return f"CastCache({len(self)} weights, {self.nbytes} bytes, {self.casts} casts)"
