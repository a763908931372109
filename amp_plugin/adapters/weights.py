"""How the weights of the models that an adapter is given are stored; the same for all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from amp_plugin.messages import warn_user
from amp_plugin.precision import StateName, WeightsName, stores_all
from amp_plugin.weights.ddp import reduce_in_fp32, sharded_by
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.optimizer_hooks import accept_entries_of_0_2, add_optimizer, warn_of_16_bits
from amp_plugin.weights.store import (
    convert_to_fp32,
    has_fp32_buffers,
    is_stored,
    restore_weights,
    set_up_unfrozen,
    set_up_when_unfrozen,
    store_weights,
    trainable,
    widen_unfrozen,
)


class ModelWeights:
    """Store the weights of models as asked, when they are set up, and tell optimizers how to keep state.

    Only where forwards run under autocast (``casts``) may weights become float32 unasked.
    """

    def __init__(self, weights: WeightsName, state: StateName = "fp32", *, casts: bool) -> None:
        self._weights = weights
        self._state = state
        self._casts = casts
        self._known: WeakSet[nn.Module] = WeakSet()
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
        if model in self._known and (not stores or is_stored(model)):
            return False
        self._known.add(model)
        narrow = 0 if is_stored(model) else sum(param.dtype in HALVES for param in trainable(model))
        if stores:
            store_weights(model, weights=self._weights, fp32_modules=fp32_modules)
            self._meets_fp32 |= bool(fp32_modules) or has_fp32_buffers(model)
            return narrow > 0
        sharded = sharded_by(model) is not None
        if narrow and (sharded or not self._casts):
            remedy = (
                "shard a model in float32, with a mixed precision policy that casts it"
                if sharded
                else "compute in mixed precision ('bf16'), which makes them float32, or use store_weights"
            )
            warn_user(
                f"{narrow} trainable parameters are in 16 bits and stay so: updates below 1/256 of a weight "
                f"(1/2048 in float16) are lost; {remedy}"
            )
        elif narrow:
            warn_user(convert_to_fp32(model))
        if self._casts and not sharded:
            set_up_when_unfrozen(model, widen_unfrozen)
            return narrow > 0
        return False

    def restore(self) -> None:
        """Give the models back as ordinary float32 ones."""
        for model in self._known:
            restore_weights(model)

    def set_up_unfrozen(self) -> None:
        """Set up weights that were frozen before, for frameworks that do not call a model's own forward."""
        for model in self._known:
            set_up_unfrozen(model)

    def add(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step in float32, and load state dicts exactly; may be called again."""
        models = list(models)
        for model in models:
            reduce_in_fp32(model)
        stored = any(map(is_stored, models))
        has_frozen = any(param.dtype in HALVES for model in models for param in model.parameters())
        for optimizer in optimizers:
            if stored or self._state != "fp32":
                add_optimizer(optimizer, self._state)
            elif has_frozen and self._casts:
                warn_of_16_bits(optimizer)
            else:
                accept_entries_of_0_2(optimizer)
