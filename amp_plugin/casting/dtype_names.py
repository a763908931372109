"""Short names of dtypes, as practitioners write them."""

from __future__ import annotations

import torch

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def short_name(dtype: torch.dtype) -> str:
    """Return ``"bf16"`` for ``torch.bfloat16``, and torch's own name where there is no shorter one."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
