"""Makes 16-bit stored parameters float32 while an optimizer steps or loads a state dict.

- In ``step()`` and ``load_state_dict()``, parameters and states are float32.
- Inside a closure that ``step()`` calls, parameters are in 16 bits again. They keep the values that the step
  has written so far.
- After a step that raises an error, parameters keep the values written so far, and stay float32 until the
  next step.

Torch's own optimizer hooks convert the parameters, so that optimizers of any class work unchanged. Nothing is
added to the state of an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from traceback import walk_stack
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from amp_plugin.messages import warn_user
from amp_plugin.module_paths import module_paths
from amp_plugin.quiet_hooks import register_quiet_hook
from amp_plugin.weights import compressed_state
from amp_plugin.weights.export import load_entry_of_0_2
from amp_plugin.weights.formats import HALVES
from amp_plugin.weights.weight import (
    FrozenParameter,
    hide_fp32,
    is_unstored_half,
    show_fp32,
    stored_params,
    stored_weight,
)

_ATTRIBUTE: Final = "_amp_plugin_weights"

_takes_steps: list[Callable[[Optimizer], list[Tensor]]] = []


def take_steps_by(take: Callable[[Optimizer], list[Tensor]]) -> None:
    """Register a function that takes one-pass steps for optimizers whose states are compressed.

    The function returns the parameters that it has updated. The module one_pass.py registers
    ``take_bare_step`` when it is imported.
    """
    _takes_steps.append(take)


def add_optimizer(optimizer: Optimizer, state: str | None = None) -> None:
    """Let an optimizer update 16-bit stored parameters in float32. A second call has no effect.

    If an optimizer has neither 16-bit stored parameters nor compressed states, its steps get no hooks.

    Args:
        optimizer: The optimizer.
        state: The format in which the optimizer's moments are stored between steps. ``state=None`` keeps the
            format that was chosen earlier.

    Raises:
        TypeError: Optimizers of this class cannot update 16-bit stored parameters.
        ValueError: The optimizer already has states in 16 bits.
    """
    if state is not None:
        compressed_state.ask_for(_params(optimizer), state)
    if _are_kept(_params(optimizer)):
        _refuse(optimizer)
        _widen_fresh_state(optimizer)
        _hooks_of(optimizer).attach_to_steps(optimizer)
    if _has_hooks(optimizer):
        _hooks_of(optimizer).compress(optimizer, loaded=True)
    getattr(optimizer, _ATTRIBUTE, OptimizerHooks()).warn_of_halves(optimizer)


def _hooks_of(optimizer: Optimizer) -> OptimizerHooks:
    if not hasattr(optimizer, _ATTRIBUTE):
        hooks = OptimizerHooks()
        setattr(optimizer, _ATTRIBUTE, hooks)
        optimizer.register_load_state_dict_pre_hook(hooks.before_load)
        optimizer.register_load_state_dict_post_hook(hooks.after_load)
    return getattr(optimizer, _ATTRIBUTE)  # type: ignore[no-any-return]


@cache
def add_late_optimizers() -> None:
    """Register a hook that calls ``add_optimizer`` when an optimizer first updates a stored parameter.

    The hook also covers optimizers that are created later. A second call to this function has no effect.
    """
    hook: Any = torch.compiler.disable(lambda optimizer, *_: add_if_late(optimizer))  # type: ignore[no-untyped-call]
    register_quiet_hook(None, hook)


def add_if_late(optimizer: Optimizer) -> None:
    """Call ``add_optimizer`` if an optimizer has 16-bit stored parameters and was not added before."""
    has_them = getattr(getattr(optimizer, _ATTRIBUTE, None), "sees_steps", False)
    if not has_them and _are_kept(_params(optimizer)):
        add_optimizer(optimizer)


class OptimizerHooks:
    """The hooks of one optimizer, which know which of its parameters and states are float32 now."""

    def __init__(self) -> None:
        self.sees_steps = False
        self._shown: list[Tensor] = []
        # The parameters that a one-pass step has updated, with their gradients.
        # The parameters' ``.grad`` is None during the optimizer's own step, which therefore does nothing.
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        # The number of base-class steps that the current step has called through super().step().
        self._inner = 0
        self._is_widened = False  # True while the states are float32
        # True if the optimizer's states are compressed between two steps.
        self._asked = False
        # The names of optimizer states about which the user was warned.
        self._told: set[str] = set()
        # The number of 16-bit parameters reported by the last warning about lost small updates.
        self._halves = 0

    def attach_to_steps(self, optimizer: Optimizer) -> None:
        """Register the hooks for steps and state dicts with torch. A second call has no effect."""
        if self.sees_steps:
            return
        self.sees_steps = True
        before, after = map(torch.compiler.disable, (self.before_step, self.after_step))
        register_quiet_hook(optimizer, before)  # one-pass steps skip this hook
        optimizer.register_step_post_hook(after)
        optimizer.register_state_dict_post_hook(self.after_state_dict)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            load = partial(_load_shown, optimizer.load_state_dict)
            optimizer.load_state_dict = load  # type: ignore[method-assign]

    def close(self, optimizer: Optimizer, *, steps: int = 0) -> None:
        """Convert parameters that are still float32 back to 16 bits, and compress the optimizer's states."""
        self._hide(steps=steps)
        if self._is_widened or (self._asked and not any(map(compressed_state.asked_for, _params(optimizer)))):
            self._is_widened = False
            self.compress(optimizer)

    def _show(self, params: Iterable[Tensor]) -> None:
        self._shown = show_fp32(param for param in params if param.requires_grad or param.grad is not None)

    def _hide(self, *, steps: int = 0) -> None:
        shown, self._shown = self._shown, []
        hide_fp32(shown, steps=steps)

    def compress(self, optimizer: Optimizer, *, loaded: bool = False) -> None:
        """Compress the optimizer's states, and warn once about each state that stays float32."""
        self._asked = any(map(compressed_state.asked_for, _params(optimizer)))
        left = set(compressed_state.compress(optimizer.state, loaded=loaded)) - self._told
        self._told |= left
        if left:
            names, moments = ", ".join(map(repr, sorted(left))), ", ".join(compressed_state.MOMENTS)
            warn_user(
                f"{type(optimizer).__name__} keeps {names} in float32: only states with the names of "
                f"moments are compressed ({moments})"
            )

    def warn_of_halves(self, optimizer: Optimizer) -> None:
        """Warn if the optimizer updates trainable 16-bit parameters that ``store_weights`` has not stored.

        Small updates of these parameters are rounded away. The warning is repeated only if the number of
        these parameters has grown.
        """
        halves = [p for p in _params(optimizer) if p.requires_grad and is_unstored_half(p)]
        if len(halves) > self._halves:
            self._halves = len(halves)  # not reset if layers are frozen again
            first = next(iter(module_paths(halves)), "")
            warn_user(
                f"{type(optimizer).__name__} steps {len(halves)} parameters in 16 bits, so updates below "
                "1/256 of a parameter (1/2048 in float16) are lost. "
                f"{f'The first is {first}. ' if first else ''}Make them before the model is set "
                "up in mixed precision, which converts them to float32; set up a loss with parameters too; "
                "shard a model in float32, with a policy that casts it"
            )

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make the parameters float32 for a step.

        If the step calls a closure, the parameters are in 16 bits while the closure runs.
        """
        if (self._shown or self._is_widened) and _is_within_its_step(optimizer):
            self._inner += 1
            return None
        self._inner = 0
        self.close(optimizer)
        self.warn_of_halves(optimizer)
        params = stored_params(_params(optimizer))
        self._is_widened = any(map(compressed_state.asked_for, _params(optimizer)))
        if any(param.grad is not None and param.grad.grad_fn is not None for param in params):
            msg = (
                f"{type(optimizer).__name__} got gradients with a graph (backward(create_graph=True)). "
                "The graph leads to the 16-bit weights, not to the float32 weights that are stepped: "
                "use weights='fp32' with it"
            )
            raise RuntimeError(msg)
        has_closure = callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1]))
        if self._is_widened and not has_closure and self._take_in_one_pass(optimizer):
            return None
        count_steps(optimizer, params)
        self._show(params)
        run = partial(partial, self._run_as_kept, optimizer, params)
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": run(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]) and not isinstance(args[1], Tensor):
            return (args[0], run(args[1]), *args[2:]), kwargs
        compressed_state.decompress(optimizer.state)
        return None

    def _take_in_one_pass(self, optimizer: Optimizer) -> bool:
        """Take a one-pass step, and hide the gradients so that the optimizer's own step does nothing."""
        stepped = [param for take in _takes_steps for param in take(optimizer)]
        self._hidden = [(param, param.grad) for param in stepped]
        for param in stepped:
            param.grad = None
        self._is_widened = not stepped
        return bool(stepped)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the parameters in 16 bits, and restore the gradients that were hidden from the step."""
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad
        self._inner -= 1
        if self._inner < 0:
            self.close(optimizer, steps=1)

    def after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """In an optimizer's state dict, replace compressed states with ordinary tensors.

        If ``restore_weights`` was called before, the tensors in the state dict are float32.
        """
        if not self._is_widened:
            self.compress(optimizer, loaded=True)
        state_dict["state"] = compressed_state.packed(state_dict["state"])

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Make the parameters float32 for loading, because torch casts states to the parameters' dtype."""
        self.close(optimizer)
        # torch passes a copy of the state dict to hooks, so this hook may change the state dict.
        state = state_dict["state"] = compressed_state.unpacked(state_dict["state"])
        params = list(dict.fromkeys(_params(optimizer)))
        for number, param in enumerate(params):
            values = tree_leaves(state.get(number)) if isinstance(param, FrozenParameter) else []
            if any(isinstance(value, Tensor) and value.dim() > 0 for value in values):
                # The frozen parameter has optimizer state, so it was trained before.
                # A frozen 16-bit parameter gets its storage format when it becomes trainable.
                # The parameter is made trainable temporarily, so that its state can be loaded in float32.
                param.requires_grad_().requires_grad_(False)
        self._shown = show_fp32(params)
        load_entry_of_0_2(params, state_dict)

    def after_load(self, optimizer: Optimizer) -> None:
        """Store the parameters in 16 bits, and compress the optimizer's states."""
        self.close(optimizer)
        self.compress(optimizer, loaded=True)

    def _run_as_kept(self, optimizer: Optimizer, params: list[Tensor], closure: Callable[[], Any]) -> Any:
        """Run a closure on the 16-bit parameters.

        During the first call to the closure, the optimizer's states are still compressed. If the step calls
        the closure again, the optimizer's states are in float32 during that call.
        """
        self._hide()
        value = closure()
        self._show(params)
        compressed_state.decompress(optimizer.state)
        return value


def _load_shown(load: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run the load hooks around an overridden ``load_state_dict``, because it might not call them itself."""
    optimizer: Any = load.__self__  # type: ignore[attr-defined]
    hooks, state_dict = OptimizerHooks(), dict(state_dict)
    hooks.before_load(optimizer, state_dict)
    try:
        return load(state_dict, *args, **kwargs)
    finally:
        hooks.after_load(optimizer)


def count_steps(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Take the step counts for stochastic rounding from the optimizer's state, which checkpoints save."""
    for param in params:
        weight = stored_weight(param)
        if weight is not None and not weight.format.kept_bytes:
            count = optimizer.state.get(param, {}).get("step", weight.steps)
            weight.steps = weight.steps if getattr(count, "is_cuda", False) else int(count)


def _is_within_its_step(optimizer: Optimizer) -> bool:
    """Return whether a subclass called the current step through ``super().step()``.

    Torch runs the hooks of both steps.
    """
    frames = (f for f, _ in walk_stack(None) if f.f_globals.get("__name__") == Optimizer.__module__)
    steps = sum("wrapper" in f.f_code.co_name and f.f_locals.get("self") is optimizer for f in frames)
    return steps > 1


def _has_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch can run hooks of an optimizer, which requires that ``Optimizer.__init__`` ran."""
    return all(hasattr(optimizer, f"_optimizer_{name}_pre_hooks") for name in ("step", "load_state_dict"))


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _are_kept(params: Iterable[Tensor]) -> bool:
    """Return whether, between steps, any parameter is stored in 16 bits or any state is compressed."""
    return any(stored_weight(param) is not None or compressed_state.asked_for(param) for param in params)


def _refuse(optimizer: Optimizer) -> None:
    reason = ""
    if not _has_hooks(optimizer):
        reason = (
            "was made without Optimizer.__init__, so torch runs no hooks at its step: pass the "
            "optimizer that it wraps (if it writes no weights itself), or"
        )
    elif hasattr(optimizer, "fused_backward"):
        reason = "steps in backward, where weights are in 16 bits and small updates are lost:"
    elif getattr(optimizer, "parameters_as_bucket_view", False):
        reason = "sends weights in 16 bits, in its own buckets: leave parameters_as_bucket_view=True out, or"
    if reason:
        msg = f"{type(optimizer).__name__} {reason} use weights='fp32' with it"
        raise TypeError(msg)


def _widen_fresh_state(optimizer: Optimizer) -> None:
    """Convert to float32 any 16-bit state that the optimizer's constructor has just created.

    The optimizer's constructor fills each state tensor with one constant.

    Raises:
        ValueError: The elements of a 16-bit state tensor differ, which means that the optimizer has already
            stepped or loaded a state dict.
    """
    for param in stored_params(_params(optimizer)):
        state = optimizer.state.get(param, {})
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dtype not in HALVES:
                continue
            if value.numel() and (value != value.flatten()[0]).any():
                msg = (
                    f"the state {name!r} of this {type(optimizer).__name__} is in {value.dtype}: it has "
                    "stepped or loaded a state dict with weights in 16 bits. Call store_weights(model, "
                    "optimizer) first, and load the state dict then"
                )
                raise ValueError(msg)
            options = [option for option in optimizer.defaults.values() if isinstance(option, float)]
            made_of = [o for o in options if (value == torch.tensor(o, dtype=value.dtype)).all()]
            state[name] = torch.full_like(value.float(), made_of[0]) if made_of else value.float()
