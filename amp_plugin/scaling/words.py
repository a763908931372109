"""How the user of an entry point spells the calls that error texts name.

The core knows no framework. An adapter passes the words of its users in, so that an error names calls
which the program at hand can make.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The calls of one entry point, as its user writes them.

    Attributes:
        backward: Runs backward on a scaled loss.
        unscale: Unscales the gradients of an optimizer.
        step: Steps it.
        prepare: Makes it known to the scaler.
        bf16: Trains in bfloat16, without a loss scale.
        endless: The option that raises the limit of skipped steps in a row, after which a run ends.
        reduce: Reduces gradients in 16 bits where DistributedDataParallel reduces them.
    """

    backward: str = "scaler.scale(loss).backward()"
    unscale: str = "scaler.unscale_(optimizer)"
    step: str = "scaler.step(optimizer)"
    prepare: str = "scaler.register(optimizer)"
    bf16: str = "autocast(device, dtype=torch.bfloat16)"
    endless: str = "the number of skipped steps that ends the run"
    reduce: str = "model.register_comm_hook(None, bf16_compress_hook)"


PLAIN = Words()
"""The words of a plain PyTorch loop."""
