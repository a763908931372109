"""What an optimizer sees of stored weights: float32 masters while it works, the model's parameters else.

::

    step(), load_state_dict():   groups hold masters; gradients and state are the masters'
    a closure within step():     groups hold the model's parameters again, which have the step's values so far
    any other time:              groups hold the model's parameters; state is under them, in float32

It is done by the hooks that torch gives every optimizer, so that any optimizer works unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.weights.checkpoint_entry import KEY, entry_of, load_entry
from amp_plugin.weights.forms import Form
from amp_plugin.weights.stored_weight import StoredWeight

_ATTRIBUTE = "_amp_plugin_weights"


def view_of(optimizer: Any) -> OptimizerView | None:
    """Return the view of an optimizer whose weights are stored in 16 bits, None of any other.

    Args:
        optimizer: torch's, or a framework's that shares its attributes.
    """
    return getattr(optimizer, _ATTRIBUTE, None)


def stored_weights(optimizer: Any, params: Iterable[Tensor]) -> list[StoredWeight]:
    """Return those of an optimizer's parameters that are stored in 16 bits, ready to be read.

    Whoever writes ``weight.param`` and ``weight.rest`` then calls ``weight.note_written()``.

    Args:
        optimizer: Any.
        params: Parameters of its groups.
    """
    view = view_of(optimizer)
    return [] if view is None else [weight for weight in view.weights(params) if weight is not None]


class OptimizerView:
    """The weights of one optimizer that are stored in 16 bits.

    Args:
        form: How they are stored.
        find: Return the stored weight of a parameter, None if it is stored as it is.
        adopt: Store a parameter that has come in 16 bits and was frozen until now.
        seed: For stochastic rounding.

    Attributes:
        steps: Optimizer steps since the weights were first stored; each rounds by draws of its own.
    """

    def __init__(
        self,
        form: Form,
        find: Callable[[Tensor], StoredWeight | None],
        adopt: Callable[[Tensor], None],
        *,
        seed: int = 0,
    ) -> None:
        self.form = form
        self.steps = 0
        self._adopt = adopt
        self._find = find
        self._seed = seed
        self._shown: list[StoredWeight] = []
        self._loading: Mapping[str, Any] | None = None

    def attach(self, optimizer: Optimizer) -> None:
        """Put the hooks on an optimizer; nothing happens if they are there.

        Raises:
            ValueError: It has state of a weight in 16 bits, made before.
        """
        if view_of(optimizer) is self:
            return
        _refuse_narrow_state(optimizer, self._find)
        setattr(optimizer, _ATTRIBUTE, self)
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)
        optimizer.register_state_dict_post_hook(self.after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.after_load)

    # -- for steps that work on weights and rests themselves -------------------------------------

    def weights(self, params: Iterable[Tensor]) -> list[StoredWeight | None]:
        """Return the stored weights of parameters, ready to be read; None for those stored as they are.

        Whoever writes ``weight.param`` and ``weight.rest`` then calls ``weight.note_written()``.
        """
        params = list(params)
        self._adopt_thawed(params)
        found = [self._find(param) for param in params]
        self.form.settle([weight for weight in found if weight is not None])
        return found

    # -- hooks -----------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Show the masters; let a closure run on the model's parameters."""
        self.give_up(optimizer)
        self._show(optimizer)
        return self._with_closure(optimizer, args, kwargs)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the masters."""
        self._hide(optimizer)
        self.steps += 1

    before_step.leaves_gradients = after_step.leaves_gradients = True  # type: ignore[attr-defined]

    def after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add what makes the model's weights exact again; the rest is as with float32 weights."""
        self.give_up(optimizer)
        found = dict(enumerate(self.weights(_distinct_params(optimizer))))
        kept = {position: weight for position, weight in found.items() if weight is not None}
        if kept:
            state_dict[KEY] = entry_of(self.form.name, kept, steps=self.steps)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let state be cast to the masters' dtype, not to the parameters'."""
        self.give_up(optimizer)
        self._loading = state_dict.get(KEY)
        if _fits(optimizer, state_dict):  # else torch raises
            weights = self._in_groups(optimizer)
            for weight in weights:
                weight.settle()
            self._swap(optimizer, weights)

    def after_load(self, optimizer: Optimizer) -> None:
        """Give the groups the model's parameters back, and the weights what was saved of them."""
        self._swap_back(optimizer)
        loading, self._loading = self._loading, None
        if loading is not None:
            weights = dict(enumerate(map(self._find, _distinct_params(optimizer))))
            self.steps = load_entry(loading, self.form.name, weights)

    # -- showing and hiding ----------------------------------------------------------------------

    @torch.no_grad()
    def _show(self, optimizer: Optimizer) -> None:
        self._adopt_thawed(_distinct_params(optimizer))
        weights = [weight for weight in self._in_groups(optimizer) if _may_be_stepped(weight.param)]
        self.form.settle(weights)
        for weight in weights:
            weight.materialize()
        self.form.fill_masters(weights)
        self._swap(optimizer, weights)
        for weight in weights:
            _move_grad(weight.param, weight.master)

    @torch.no_grad()
    def _hide(self, optimizer: Optimizer) -> None:
        weights = self._shown
        written = next((weight for weight in weights if weight.is_written), None)
        self.form.store_masters(weights, seed=self._seed, step=self.steps)
        self._take_back(optimizer)
        if written is not None:
            msg = (
                f"{type(optimizer).__name__} has written a weight of shape {tuple(written.param.shape)} in "
                f"{written.param.dtype} itself, not the float32 master in its param_groups: it keeps "
                "parameters of its own. Use weights='fp32' with this optimizer"
            )
            raise RuntimeError(msg)

    def _take_back(self, optimizer: Optimizer) -> None:
        """Free the masters and give gradients, state and groups back to the parameters."""
        weights = self._shown
        self._swap_back(optimizer)
        for weight in weights:
            _move_grad(weight.master, weight.param)
            weight.release()

    def give_up(self, optimizer: Optimizer) -> None:
        """End a step that an exception has ended: what it did to masters is dropped."""
        self._loading = None
        if self._shown:
            self._take_back(optimizer)

    def _adopt_thawed(self, params: Iterable[Tensor]) -> None:
        """Store parameters that came in 16 bits and frozen, and are trained now."""
        for param in params:
            if param.dtype is self.form.dtype and param.grad is not None and self._find(param) is None:
                self._adopt(param)

    def _in_groups(self, optimizer: Optimizer) -> list[StoredWeight]:
        found = map(self._find, _distinct_params(optimizer))
        return [weight for weight in found if weight is not None]

    def _swap(self, optimizer: Optimizer, weights: list[StoredWeight]) -> None:
        _replace(optimizer, {weight.param: weight.master for weight in weights})
        self._shown = weights

    def _swap_back(self, optimizer: Optimizer) -> None:
        weights, self._shown = self._shown, []
        _replace(optimizer, {weight.master: weight.param for weight in weights})

    # -- closures --------------------------------------------------------------------------------

    def _with_closure(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._on_model(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]) and not isinstance(args[1], Tensor):
            return (args[0], self._on_model(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _on_model(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that finds the model with the weights that the optimizer has set so far."""

        def run() -> Any:
            self._hide(optimizer)
            value = closure()
            self._show(optimizer)
            return value

        return run


def _replace(optimizer: Optimizer, replacements: dict[Tensor, Tensor]) -> None:
    """Replace parameters in groups, in place, since optimizers keep those lists; and in the state."""
    for group in optimizer.param_groups:
        params = group["params"]
        params[:] = [replacements.get(param, param) for param in params]
    state = optimizer.state
    for old, new in replacements.items():
        if old in state:
            state[new] = state.pop(old)


def _move_grad(source: Tensor, target: Tensor) -> None:
    """Hand a gradient on; nobody else has it meanwhile, so that it is zeroed or added to once."""
    grad, source.grad = source.grad, None
    if grad is None:
        return
    wanted = getattr(target, "grad_dtype", None) or target.dtype
    target.grad = grad if grad.dtype is wanted else grad.to(wanted)


def _may_be_stepped(param: Tensor) -> bool:
    return param.requires_grad or param.grad is not None


def _distinct_params(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in the order in which torch numbers them in a state dict."""
    return list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))


def _fits(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> bool:
    ours, saved = optimizer.param_groups, state_dict.get("param_groups", ())
    return [len(group["params"]) for group in ours] == [len(group["params"]) for group in saved]


def _refuse_narrow_state(optimizer: Optimizer, find: Callable[[Tensor], StoredWeight | None]) -> None:
    for param, state in optimizer.state.items():
        if not isinstance(param, Tensor) or find(param) is None:
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype in {torch.bfloat16, torch.float16}:
                msg = (
                    f"the state {name!r} of this {type(optimizer).__name__} is in {value.dtype}: it has "
                    "stepped or loaded a state dict with weights in 16 bits. Call store_weights(model, "
                    "optimizer) first, and load the state dict then"
                )
                raise ValueError(msg)
