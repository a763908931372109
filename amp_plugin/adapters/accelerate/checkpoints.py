"""Saving and loading: optimizers that step while their state is made, checkpoints without a loss scale."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import OPTIMIZER_NAME, SCALER_NAME, FullyShardedDataParallelPlugin
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate.optimizer import AmpOptimizer
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.user_warnings import warn_user


@contextmanager
def optimizers_unscaled(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let prepared optimizers step without the scaler.

    FSDP makes an optimizer's state by a step with zero gradients when it saves or loads; through the
    scaler that step would count as a good one (huggingface/accelerate#4289).
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, AmpOptimizer):
                stack.enter_context(optimizer.unscaled())
        yield


def warn_of_lost_states(
    plugin: FullyShardedDataParallelPlugin, optimizers: Iterable[Optimizer], folder: Path
) -> None:
    """Warn where a checkpoint of FSDP1 in shards has left a new optimizer without its state.

    torch reads from such a checkpoint what is there to be filled, and Accelerate asks the optimizer.

    Args:
        plugin: Accelerate's, of FSDP1.
        optimizers: loaded by now.
        folder: the checkpoint.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 -- loads torch.distributed
    from torch.distributed.fsdp import StateDictType  # noqa: PLC0415

    if plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
        return
    for index, optimizer in enumerate(optimizers):
        saved = FileSystemReader(folder / f"{OPTIMIZER_NAME}_{index}").read_metadata().state_dict_metadata
        if not optimizer.state and any(key.startswith("optimizer.state.") for key in saved):
            warn_user(
                f"the optimizer's state in {folder} is not loaded: checkpoints of FSDP1 in shards do not "
                "restore that of a new optimizer, and this one starts anew; use fsdp_version=2, "
                "which restores it"
            )


def load_into_exact_weights() -> None:
    """Let ``transformers.Trainer`` set weights up before it loads a checkpoint; once, if it is imported.

    It loads before it prepares, which rounds to the 16 bits of a model that came in them. A Trainer with
    another accelerator loads as before.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(trainer._load_from_checkpoint, "__wrapped__"):
        return
    load = trainer._load_from_checkpoint

    @functools.wraps(load)
    def load_exactly(self: Any, checkpoint: str, model: Any = None) -> Any:
        set_up = getattr(self.accelerator, "set_up_weights", None)
        if set_up is not None:
            set_up(self.model if model is None else model)
        return load(self, checkpoint, model)

    trainer._load_from_checkpoint = load_exactly


def load_loss_scale(scaler: GradScaler, folder: Path) -> None:
    """Load the loss scale of a checkpoint; warn if it has none and keep the present one."""
    if not scaler.is_enabled():
        return
    file = folder / SCALER_NAME
    if file.is_file():
        scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return
    warn_user(
        f"the checkpoint {folder} has no {SCALER_NAME}, it was not saved in fp16; "
        f"the loss scale stays at {scaler.get_scale():g}"
    )
