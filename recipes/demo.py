"""The command ``make demo`` trains the digits classifier in a precision that is fast on this machine.

PyTorch's fp16 convolutions are slow on a CPU, even if the processor has fp16 arithmetic.
"""

from __future__ import annotations

import sys

import torch

from amp_plugin.hardware import is_fast
from recipes import train_digits


def fast_precision() -> str:
    """Return fp16 on a GPU. On a CPU, return bf16 if the processor has bf16 arithmetic, else fp32."""
    if torch.cuda.is_available():
        return "fp16"
    return "bf16" if is_fast("bf16", "cpu") else "fp32"


def main() -> None:
    """Run the recipe. The command-line arguments, such as ``precision=fp16``, are passed on to the recipe."""
    precision = fast_precision()
    print(f"training in {precision}, which is fast here; in fp16: make demo PRECISION=fp16", flush=True)
    sys.argv[1:1] = [f"precision={precision}"]
    train_digits.main()


if __name__ == "__main__":
    main()
