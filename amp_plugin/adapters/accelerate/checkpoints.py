"""Saving and loading: optimizers that load their state, checkpoints without a loss scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import SCALER_NAME

from amp_plugin.adapters.accelerate.optimizer import AmpOptimizer
from amp_plugin.casting.invalidate import invalidate

if TYPE_CHECKING:
    from amp_plugin.adapters.accelerate.accelerator import AmpAccelerator


@contextmanager
def optimizers_unscaled(accelerator: AmpAccelerator) -> Iterator[None]:
    """Let optimizers step without the scaler.

    FSDP makes an optimizer's state by a step with zero gradients when it saves or loads; through the
    scaler that step would count as a good one (huggingface/accelerate#4289).
    """
    with ExitStack() as stack:
        for optimizer in accelerator._optimizers:
            if isinstance(optimizer, AmpOptimizer):
                stack.enter_context(optimizer.unscaled())
        yield


def remember_folder(accelerator: AmpAccelerator) -> Callable[[list[Any], str], None]:
    """Return a hook that learns which folder ``load_state`` has settled on."""

    def remember(_: list[Any], folder: str) -> None:
        accelerator._loaded_folder = Path(folder)

    return remember


@contextmanager
def loss_scale_apart(accelerator: AmpAccelerator) -> Iterator[None]:
    """Load everything but the loss scale within, then the loss scale if the checkpoint has one."""
    scaler, accelerator.scaler = accelerator.scaler, None
    try:
        yield
    finally:
        accelerator.scaler = scaler
    invalidate()
    if scaler is None or accelerator._loaded_folder is None:
        return
    file = accelerator._loaded_folder / SCALER_NAME
    if file.is_file():
        scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return
    warnings.warn(
        f"the checkpoint {accelerator._loaded_folder} has no {SCALER_NAME}, it was not saved in fp16; "
        f"the loss scale stays at {scaler.get_scale():g}",
        UserWarning,
        stacklevel=4,
    )
