"""The names of calls in error messages, for plain PyTorch loops and for each framework.

The scaler does not know whether Lightning, Accelerate or a plain loop uses it. Each adapter tells the scaler
how calls are written in its framework. An error message can then name a call that the user can make.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The calls that error messages mention, as users of a plain loop, Lightning or Accelerate write them.

    Attributes:
        backward: The call that runs backward on a scaled loss.
        unscale: The call that unscales the gradients of an optimizer.
        step: The call that steps an optimizer.
        prepare: The call that registers an optimizer with the scaler.
        bf16: How to train in bfloat16, which needs no loss scale.
        endless: The option that sets how many skipped steps in a row end a run.
        reduce: How to make DistributedDataParallel reduce gradients in 16 bits.
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
