"""How the weights of the models that an adapter is given are stored; the same for all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from amp_plugin.precision import WeightsName
from amp_plugin.user_warnings import warn_user
from amp_plugin.weights.conversion import HALVES, convert_to_fp32, trainable
from amp_plugin.weights.ddp import reduce_in_fp32
from amp_plugin.weights.exact_loading import load_exactly
from amp_plugin.weights.optimizer_view import view_of
from amp_plugin.weights.refusals import sharded_by
from amp_plugin.weights.store_weights import store_weights
from amp_plugin.weights.thawed import FrozenWeights, expect_thawed, widen_when_thawed
from amp_plugin.weights.weight_store import store_of


class ModelWeights:
    """Store the weights of models as asked, when they are set up, and tell their optimizers.

    Args:
        weights: How.
        casts: Whether forwards run under autocast: only then may weights become float32 unasked.
    """

    def __init__(self, weights: WeightsName, *, casts: bool) -> None:
        self._weights = weights
        self._casts = casts
        self._known: WeakKeyDictionary[nn.Module, FrozenWeights | None] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked for; a process that is spawned knows no model yet."""
        return partial(type(self), casts=self._casts), (self._weights,)

    @property
    def are_stored(self) -> bool:
        """Whether weights are stored in 16 bits."""
        return self._weights != "fp32"

    def set_up(self, model: nn.Module, fp32_modules: Sequence[str] = ()) -> None:
        """Store a model's weights as asked, before it is wrapped or moved; once for each model.

        Args:
            model: The model.
            fp32_modules: Names or classes of its modules that stay in float32.

        Raises:
            TypeError: It is sharded, and weights are to be stored in 16 bits.
            ValueError: A pattern of ``fp32_modules`` matches no module.
        """
        if model in self._known:
            return
        self._known[model] = None
        if self.are_stored:
            store_weights(model, weights=self._weights, fp32_modules=fp32_modules)
            return
        narrow = [param for param in trainable(model) if param.dtype in HALVES]
        sharded = sharded_by(model) is not None
        if narrow and (sharded or not self._casts):
            warn_user(self._lost_updates(len(narrow), sharded=sharded))
        elif narrow and (converted := convert_to_fp32(model)) is not None:
            warn_user(str(converted))
        if self._casts and not sharded:
            self._known[model] = widen_when_thawed(model)

    def widen_thawed(self) -> None:
        """Make float32 of weights that were frozen in 16 bits at set-up and are trained now.

        A model's own forward pass does so too; this is for frameworks that do not call it.
        """
        for model, frozen in self._known.items():
            if frozen is not None:
                frozen(model)

    @staticmethod
    def _lost_updates(count: int, *, sharded: bool) -> str:
        remedy = (
            "shard a model in float32, with a mixed precision policy that casts it"
            if sharded
            else "compute in mixed precision ('bf16'), which makes them float32, or use store_weights"
        )
        return (
            f"{count} trainable parameters are in 16 bits and stay so: updates below 1/256 of a weight "
            f"(1/2048 in float16) are lost; {remedy}"
        )

    @staticmethod
    def wrap(model: nn.Module) -> None:
        """Note that a model is wrapped: under DDP its gradients are reduced in float32.

        Raises:
            ValueError: DDP was asked to keep gradients in its buckets.
        """
        reduce_in_fp32(model)

    def add(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step masters, and load state dicts exactly; may be called again."""
        models, optimizers = list(models), list(optimizers)
        for model in models:
            self.wrap(model)
        stores = [store for model in models if (store := store_of(model)) is not None]
        for store in stores:
            store.add(*optimizers)
        has_frozen = any(param.dtype in HALVES for model in models for param in model.parameters())
        for optimizer in optimizers:
            if view_of(optimizer) is None:
                load_exactly(optimizer)
                if has_frozen and self._casts and not self.are_stored:
                    expect_thawed(optimizer)
