"""Benchmark figures that other projects have published. They were not measured for this report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedClipping:
    """The time to clip gradients by norm on a GPU in microseconds, from pytorch/pytorch#91846 (January 2023).

    The tensors have 256 elements. The numbers are in the table "(tensors, scalar)" of the pull request.
    """

    tensors: int
    loop: float
    foreach: float
    apex: float


CLIPPING_SOURCE = "[pytorch/pytorch#91846](https://github.com/pytorch/pytorch/pull/91846)"
CLIPPING = (
    PublishedClipping(tensors=10, loop=118.9, foreach=62.3, apex=51.5),
    PublishedClipping(tensors=100, loop=955.2, foreach=243.1, apex=134.2),
    PublishedClipping(tensors=1000, loop=9374.9, foreach=2140.7, apex=1009.6),
    PublishedClipping(tensors=10_000, loop=95302.5, foreach=21849.4, apex=10215.5),
)

DEEPSPEED = (
    "We found no published times for the check, norm and clipping in DeepSpeed's fp16 optimizer. DeepSpeed "
    "says that its CPU Adam is 5 to 7 times faster than PyTorch's "
    "([ZeRO-Offload tutorial](https://www.deepspeed.ai/tutorials/zero-offload)). DeepSpeed's claim "
    "predates torch's fused AdamW for the CPU, and concerns only the optimizer, which we leave to torch."
)
