"""The weights of a model that are stored in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.weights.copied_optimizers import keep_in_copies
from amp_plugin.weights.forms import FORMS, Form
from amp_plugin.weights.late_optimizers import expect_optimizers
from amp_plugin.weights.optimizer_view import OptimizerView, view_of
from amp_plugin.weights.stored_weight import StoredWeight

_ATTRIBUTE = "_amp_plugin_weight_store"
_STORABLE = {torch.float32, torch.bfloat16, torch.float16}


def store_of(model: nn.Module) -> WeightStore | None:
    """Return the store of a model, or of a model that it wraps; None if its weights are as they are."""
    stores = (vars(module).get(_ATTRIBUTE) for module in model.modules())
    return next((store for store in stores if store is not None), None)


class WeightStore:
    """The weights of one model that are stored in 16 bits, and the optimizers that step them.

    Args:
        form: How they are stored.
        seed: For stochastic rounding.
    """

    def __init__(self, form: Form, *, seed: int = 0) -> None:
        self.form = form
        self._seed = seed
        self._weights: dict[int, StoredWeight] = {}
        self._in_fp32 = False
        expect_optimizers(self.has, self.add)

    # -- what is stored --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StoredWeight]:
        """Iterate over the stored weights."""
        return iter(self._weights.values())

    def __len__(self) -> int:
        """Return the number of stored weights."""
        return len(self._weights)

    def find(self, param: Tensor) -> StoredWeight | None:
        """Return the stored weight of a parameter, None if it is stored as it is."""
        weight = self._weights.get(id(param))
        return weight if weight is not None and weight.param is param else None

    def has(self, param: Tensor) -> bool:
        """Whether a parameter is stored in 16 bits."""
        return self.find(param) is not None

    @torch.no_grad()
    def take(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Store parameters of a model, in place: each stays the object it is.

        Args:
            model: Its state dicts in float32 are then loaded without losing a bit.
            params: float32, bfloat16 or float16; gradients that they have become float32.
        """
        for param in params:
            if self.find(param) is None:
                self._weights[id(param)] = self._stored(param)
        if vars(model).get(_ATTRIBUTE) is not self:
            setattr(model, _ATTRIBUTE, self)
            for module in model.modules():
                if any(True for _ in module.parameters(recurse=False)):
                    module.register_load_state_dict_pre_hook(self.before_load)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def adopt(self, param: Tensor) -> None:
        """Store a parameter that was frozen when the model was stored, and is trained now.

        Args:
            param: In the dtype that weights are stored in.
        """
        self._weights[id(param)] = self._stored(param)

    def _stored(self, param: Tensor) -> StoredWeight:
        grad, param.grad = param.grad, None
        value, rest = self.form.split(param.detach().float())
        if param.dtype is not value.dtype:
            param.data = value
        else:
            param.copy_(value)
        weight = StoredWeight(param, rest)
        if grad is not None:
            param.grad = grad.float()
        return weight

    # -- optimizers ------------------------------------------------------------------------------

    def add(self, *optimizers: Optimizer) -> None:
        """Let optimizers step the masters; before their first step, and before they load a state dict.

        Args:
            *optimizers: Of any class; those known already and those without a stored weight are passed over.

        Raises:
            ValueError: An optimizer has state in 16 bits, made before.
        """
        for optimizer in optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if view_of(optimizer) is None and any(self.find(param) is not None for param in params):
                OptimizerView(self.form, self.find, self.adopt, seed=self._seed).attach(optimizer)
                keep_in_copies(optimizer, self)

    # -- in float32 ------------------------------------------------------------------------------

    @contextmanager
    def in_fp32(self, model: nn.Module) -> Iterator[None]:
        """Give a model its weights in float32 within a block, to average, export or edit them.

        ``model.parameters()`` and ``model.state_dict()`` are the float32 masters there, and what is written
        to them is stored at its end. Optimizers must not step in it.

        Args:
            model: The one whose weights these are, or one that wraps it.
        """
        weights = list(self)
        self._settle_and_fill(weights)
        masters = {weight.param: weight.master for weight in weights}
        places = _replace(model, masters)
        self._in_fp32 = True
        try:
            yield
        finally:
            self._in_fp32 = False
            for owner, name, param in places:
                owner._parameters[name] = param
            self._store_and_release(weights)

    @torch.no_grad()
    def _settle_and_fill(self, weights: list[StoredWeight]) -> None:
        self.form.settle(weights)
        for weight in weights:
            weight.materialize()
        self.form.fill_masters(weights)

    @torch.no_grad()
    def _store_and_release(self, weights: list[StoredWeight]) -> None:
        self.form.store_masters(weights, seed=self._seed, step=-1)
        for weight in weights:
            weight.release()

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict of a model with its exact weights in float32, to export it.

        Args:
            model: The one whose weights these are.
        """
        with self.in_fp32(model):
            return {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in model.state_dict().items()
            }

    @torch.no_grad()
    def before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take float32 weights from a state dict that a module is about to load, all bits of them."""
        if self._in_fp32:
            return
        for name, param in module.named_parameters(recurse=False):
            weight, value = self.find(param), state_dict.get(prefix + name)
            if weight is None or not isinstance(value, Tensor) or value.dtype is not torch.float32:
                continue
            if value.shape == param.shape:
                state_dict[prefix + name], rest = self.form.split(value.detach())
                weight.settle()
                weight.load_rest(rest)

    # -- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightStore:
        """Copy with the model; a copy made while the model is in float32 is one with nothing stored."""
        made = WeightStore(self.form, seed=self._seed)
        memo[id(self)] = made
        made._fill([] if self._in_fp32 else [copy.deepcopy(weight, memo) for weight in self])
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Pickle with the model."""
        weights = [] if self._in_fp32 else list(self)
        return {"form": self.form.name, "seed": self._seed, "weights": weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore with the model."""
        WeightStore.__init__(self, FORMS[state["form"]], seed=state["seed"])
        self._fill(state["weights"])

    def _fill(self, weights: Iterable[StoredWeight]) -> None:
        self._weights = {id(weight.param): weight for weight in weights}


def _replace(
    model: nn.Module, replacements: dict[Tensor, nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Replace parameters in the modules that have them, tied ones in all; return where they were."""
    places = []
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param in replacements:
                places.append((module, name, param))
    for module, name, param in places:
        module._parameters[name] = replacements[param]
    return places
