"""Numbers that go from one device to another, and streams that they are made on."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``, ready for whatever is put on that device next.

    A copy to an accelerator is not waited for: what reads the tensor there comes later in the same stream.
    The host has no stream and reads at once, so a copy to the host waits until it has arrived.

    Returns:
        The tensor itself if it is there already, else a copy.
    """
    if tensor.device == device:
        return tensor
    to_host = device.type == "cpu" and tensor.device.type != "cpu"
    return tensor.to(device, non_blocking=not to_host)


def stream_number(device: torch.device) -> int:
    """Return a number that stands for the current stream of a device; 0 where a device has none.

    What is made on one stream must not be handed out on another, which may be ahead of it.
    """
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
