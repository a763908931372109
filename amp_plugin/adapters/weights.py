"""How the weights of the models that an adapter is given are stored; the same for all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.precision import StateName, WeightsName, stores_all
from amp_plugin.weights.ddp import reduce_in_fp32, sharded_by
from amp_plugin.weights.optimizer_hooks import add_optimizer
from amp_plugin.weights.store import convert_to_fp32, is_stored, restore_weights, store_weights
from amp_plugin.weights.weight import HALVES


class ModelWeights:
    """Store the weights of models as asked, when they are set up, and tell optimizers how to keep state."""

    def __init__(self, weights: WeightsName, state: StateName = "fp32", *, casts: bool) -> None:
        self._weights = weights
        self._state = state
        self._casts = casts  # forwards run under autocast: else no weights become float32 unasked
        self.models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # set up, in order
        self._meets_fp32 = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked for; a process that is spawned knows no model yet."""
        return partial(type(self), casts=self._casts), (self._weights, self._state)

    @property
    def are_all_stored(self) -> bool:
        """Whether all weights are stored in 16 bits, and activations are in 16 bits too."""
        return stores_all(self._weights)

    @property
    def replace_autocast(self) -> bool:
        """Whether models compute in 16 bits without autocast: all that they hold is in 16 bits."""
        return self.are_all_stored and not self._meets_fp32

    def set_up(self, model: nn.Module, fp32_modules: Sequence[str] = ()) -> bool:
        """Store a model's weights as asked, before it is wrapped or moved; again once they are given back.

        Returns whether weights in 16 bits became exact ones: a checkpoint loaded before was rounded.
        """
        stores = self._weights != "fp32"
        if model in self.models and (not stores or is_stored(model)):
            return False
        self.models[model] = None
        came_narrow = not is_stored(model) and any(
            param.requires_grad and param.dtype in HALVES for param in model.parameters()
        )
        if stores:
            store_weights(model, weights=self._weights, fp32_modules=fp32_modules)
            self._meets_fp32 |= bool(fp32_modules) or any(map(_has_fp32_buffers, model.modules()))
        elif self._casts and sharded_by(model) is None:
            if line := convert_to_fp32(model):
                warn_user(line)
        else:
            return False
        return came_narrow

    def restore(self) -> None:
        """Give the models back as ordinary float32 ones; the next run sets them up again."""
        while self.models:
            restore_weights(self.models.popitem()[0])

    def add(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step in float32, and load state dicts exactly; may be called again."""
        for model in models:
            reduce_in_fp32(model)
        for optimizer in optimizers:
            add_optimizer(optimizer, self._state)


def _has_fp32_buffers(module: nn.Module) -> bool:
    """Whether activations may meet float32 buffers in a module; the statistics of norms do no harm."""
    dtypes = {buffer.dtype for buffer in module.buffers(recurse=False)}
    return torch.float32 in dtypes and not isinstance(module, _NormBase)
