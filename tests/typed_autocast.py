"""How a type checker sees regions. ``make lint`` fails if an expected error does not occur."""

import torch

from amp_plugin import autocast


@autocast("cpu", dtype=torch.bfloat16)
def doubled(batch: torch.Tensor, times: int) -> torch.Tensor:
    """A decorated function keeps its types."""
    return batch * times


def right() -> torch.Tensor:
    """A region has the same type as torch's autocast blocks."""
    region: torch.autocast = autocast("cpu")
    with region, autocast("cpu", torch.float16, enabled=False):
        return doubled(torch.ones(1), 2)


def wrong() -> None:
    """A wrong argument and a wrong result of a decorated function, and a device that is not a string."""
    doubled(torch.ones(1), "2")  # type: ignore[arg-type]
    text: str = doubled(torch.ones(1), 2)  # type: ignore[assignment]
    autocast(text, dtype="bf16")  # type: ignore[arg-type]
