"""``make demo``: train the digits classifier in a precision that this machine is fast in.

torch has slow fp16 convolutions on a CPU, even where the processor has arithmetic for it.
"""

from __future__ import annotations

import sys

import torch

from amp_plugin.hardware import is_fast
from recipes import train_digits


def fast_precision() -> str:
    """Return fp16 on a GPU, and on a CPU bf16 if it has arithmetic for it, else fp32."""
    if torch.cuda.is_available():
        return "fp16"
    return "bf16" if is_fast("bf16", "cpu") else "fp32"


def main() -> None:
    """Run the recipe; more arguments are its own, ``precision=fp16`` for instance."""
    precision = fast_precision()
    print(f"training in {precision}, which is fast here; in fp16: make demo PRECISION=fp16", flush=True)
    sys.argv[1:1] = [f"precision={precision}"]
    train_digits.main()


if __name__ == "__main__":
    main()
