"""Stored parameters are float32 while an optimizer steps or loads a state dict.

::

    step(), load_state_dict():  parameters and state are float32
    a closure within step():    parameters are 16 bits again, with the values that the step has set so far
    a step that raises:         parameters are 16 bits again when the exception is dropped, or at the next
                                step, with the values that it has set, as in torch

torch's own hooks do it, so that optimizers of any class work unchanged; nothing is put into their state.
Under ``weights="fp32"`` the same hooks see to weights that are frozen in 16 bits and trained later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from amp_plugin.messages import warn_user
from amp_plugin.weights.compressed_state import (
    MOMENTS,
    ask_for,
    asked_for,
    compress,
    decoded,
    decompress,
    packed,
    unpacked,
)
from amp_plugin.weights.formats import FORMATS, HALVES
from amp_plugin.weights.weight import (
    fp32_shown,
    hide_fp32,
    is_unstored_half,
    is_whole,
    show_fp32,
    stored_params,
    stored_weight,
    widen_,
)

_ATTRIBUTE: Final = "_amp_plugin_weights"
ENTRY_OF_0_2: Final = "amp_plugin_weights"
_LOAD_HOOKS: Final = "_optimizer_load_state_dict_pre_hooks"


def add_optimizer(optimizer: Optimizer, state: str | None = None) -> None:
    """Let an optimizer step stored parameters in float32, or refuse it; any number of calls.

    ``state``: the format that the states of its parameters are kept in; None: as it was asked for.
    """
    _refuse(optimizer)
    if state is not None:
        ask_for(_params(optimizer), state)
    _widen_fresh_state(optimizer)
    _hooks_of(optimizer).compress(optimizer, loaded=True)


def warn_of_16_bits(optimizer: Optimizer) -> None:
    """Warn once when an optimizer steps parameters in 16 bits, and widen those that load float32 state."""
    if _has_hooks(optimizer):
        _hooks_of(optimizer).warns = True


def _hooks_of(optimizer: Optimizer) -> OptimizerHooks:
    if not hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, OptimizerHooks())
        getattr(optimizer, _ATTRIBUTE).attach(optimizer)
    return getattr(optimizer, _ATTRIBUTE)  # type: ignore[no-any-return]


def add_late_optimizers() -> None:
    """Add other optimizers before they first step a stored parameter; any number of calls."""
    if not any(getattr(hook, "adds_late_optimizers", False) for hook in _global_optimizer_pre_hooks.values()):
        hook: Any = torch.compiler.disable(_add_if_late)  # type: ignore[no-untyped-call]
        hook.adds_late_optimizers = hook.leaves_gradients = True
        hook.leaves_steps = True  # a step in one pass does without it
        register_optimizer_step_pre_hook(hook)


def _add_if_late(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    params = list(_params(optimizer))
    if not hasattr(optimizer, _ATTRIBUTE) and (stored_params(params) or any(map(asked_for, params))):
        add_optimizer(optimizer)


class OptimizerHooks:
    """What one optimizer shows of the parameters that it steps; ``warns``: of those in 16 bits."""

    def __init__(self) -> None:
        self._shown: list[Tensor] = []
        self._widened: Optimizer | None = None  # whose state is float32 meanwhile
        self._told: set[str] = set()
        self.warns = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Show nothing in a copy or a pickle."""
        return OptimizerHooks, ()

    def attach(self, optimizer: Optimizer) -> None:
        """Put the hooks on an optimizer."""
        before, after = map(torch.compiler.disable, (self.before_step, self.after_step))
        for hook in (before, after):
            hook.leaves_gradients = True  # else no step is taken in one pass
        before.leaves_steps = True
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.after_load)
        optimizer.register_state_dict_post_hook(self.after_state_dict)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            optimizer.load_state_dict = _ShownLoad(optimizer.load_state_dict)  # type: ignore[method-assign]

    def close(self, *, steps: int = 0) -> None:
        """Store what is still shown, and compress the states."""
        self._hide(steps=steps)
        optimizer, self._widened = self._widened, None
        if optimizer is not None:
            self.compress(optimizer)

    def _show(self, params: Iterable[Tensor]) -> None:
        self._shown = show_fp32(param for param in params if param.requires_grad or param.grad is not None)

    def _hide(self, *, steps: int = 0) -> None:
        shown, self._shown = self._shown, []
        hide_fp32(shown, steps=steps)

    def compress(self, optimizer: Optimizer, *, loaded: bool = False) -> None:
        """Compress the states of parameters that it was asked for, and say once which are left."""
        left = set(compress(optimizer.state, loaded=loaded)) - self._told
        self._told |= left
        if left:
            warn_user(
                f"{type(optimizer).__name__} keeps {', '.join(map(repr, sorted(left)))} in float32: only "
                f"moments are compressed, which are known by their names ({', '.join(MOMENTS)})"
            )

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Show the parameters; let a closure run on 16 bits."""
        self.close()
        params = stored_params(_params(optimizer))
        if any(map(asked_for, _params(optimizer))):
            self._widened = optimizer
        if any(param.grad is not None and param.grad.grad_fn is not None for param in params):
            msg = (
                f"{type(optimizer).__name__} is given gradients with a graph (backward(create_graph=True)), "
                "which leads to weights in 16 bits, not to the float32 it steps: use weights='fp32' with it"
            )
            raise RuntimeError(msg)
        self._count_steps(optimizer, params)
        self._show(params)
        if not params and self._widened is None:
            decompress(optimizer.state)
            return None
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._as_kept(optimizer, params, kwargs["closure"])}
        elif len(args) > 1 and callable(args[1]) and not isinstance(args[1], Tensor):
            args = (args[0], self._as_kept(optimizer, params, args[1]), *args[2:])
        else:
            decompress(optimizer.state)
        arguments = _Arguments(args)
        arguments.hooks = self
        return arguments, kwargs

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Store them; warn once of others in 16 bits."""
        self.close(steps=1)
        left = [param for param in _params(optimizer) if is_unstored_half(param)] if self.warns else []
        count = sum(param.grad is not None for param in left)
        if count:
            self.warns = False
            warn_user(
                f"{count} parameters in 16 bits were frozen, or not made yet, when the model was set up, so "
                f"that they did not become float32, and {type(optimizer).__name__} steps them now: updates "
                "below 1/256 of a weight (1/2048 in float16) are lost. Unfreeze or make them before the "
                "model is set up"
            )

    def after_state_dict(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        """Put plain tensors in the place of compressed states."""
        state_dict["state"] = packed(state_dict["state"])

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Show the parameters until it is loaded, and widen others with float32 state: torch casts state."""
        self.close()
        state_dict["state"] = unpacked(state_dict["state"])  # the hooks' own copy
        load_entry_of_0_2(optimizer, state_dict)
        for number, param in enumerate(dict.fromkeys(_params(optimizer))) if self.warns else ():
            state = state_dict["state"].get(number, {}).values()
            in_fp32 = any(isinstance(v, Tensor) and v.dtype is torch.float32 and v.dim() > 0 for v in state)
            if in_fp32 and is_unstored_half(param) and is_whole(param):
                widen_(param)
        self._shown = show_fp32(_params(optimizer))

    def after_load(self, optimizer: Optimizer) -> None:
        """Store them, and the state."""
        self.close()
        self.compress(optimizer, loaded=True)

    def _count_steps(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        """Let stochastic rounding go on where the optimizer's own count, which it saves, says."""
        for param in params:
            weight = stored_weight(param)
            if weight is not None and not weight.format.kept_bytes:
                count = optimizer.state.get(param, {}).get("step", weight.steps)
                weight.steps = int(count) if not isinstance(count, Tensor) or count.is_cpu else weight.steps

    def _as_kept(
        self, optimizer: Optimizer, params: list[Tensor], closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Let a closure run on 16 bits, and the first call on states as they are kept between steps."""

        def run() -> Any:
            self._hide()
            value = closure()
            self._show(params)
            decompress(optimizer.state)
            return value

        return run


class _Arguments(tuple[Any, ...]):  # noqa: SLOT001 -- it has an attribute
    """The arguments of a step, which end when the step does, by an exception too."""

    hooks: OptimizerHooks

    def __del__(self) -> None:
        if not _is_running(self[0]):
            self.hooks.close()


def _is_running(optimizer: object) -> bool:
    """Whether a step of an optimizer is on the stack: another hook may have replaced its arguments."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__") != Optimizer.__module__ or frame.f_locals.get("self") is not optimizer
    ):
        frame = frame.f_back
    return frame is not None


class _ShownLoad:
    """A class's own ``load_state_dict``, which may not call torch's hooks."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self.load = load

    def __call__(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self.load.__self__  # type: ignore[attr-defined]
        hooks, state_dict = OptimizerHooks(), dict(state_dict)
        hooks.before_load(optimizer, state_dict)
        try:
            return self.load(state_dict, *args, **kwargs)
        finally:
            hooks.close()
            compress(optimizer.state, loaded=True)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether torch runs hooks of an optimizer: not of one that was made without ``Optimizer.__init__``."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, _LOAD_HOOKS)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


# -- what 0.2 has saved ------------------------------------------------------------------------------


def accept_entries_of_0_2(optimizer: Optimizer) -> None:
    """Let any optimizer load what 0.2 kept of stored weights, and compressed states; any number of calls."""
    if _has_hooks(optimizer) and load_entry_of_0_2 not in getattr(optimizer, _LOAD_HOOKS).values():
        optimizer.register_load_state_dict_pre_hook(load_entry_of_0_2)
        optimizer.register_load_state_dict_pre_hook(_decode_state)


def _decode_state(_: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = decoded(state_dict["state"])  # the hooks' own copy


@torch.no_grad()
def load_entry_of_0_2(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Add to the weights what the optimizer's checkpoint of 0.2 kept beside the 16 bits of the model's.

    The model is loaded by now; a weight that is not the one that was saved is left as it is.
    """
    entry = state_dict.get(ENTRY_OF_0_2)
    if entry is None:
        return
    params = list(dict.fromkeys(_params(optimizer)))
    with fp32_shown(params):
        for number, saved in entry["rests"].items():
            param = params[number]
            if param.dtype is not torch.float32 or saved.shape != param.shape:
                continue
            whole, same = saved.to(param.device), param.bfloat16().float() == param
            if whole.dtype is torch.float32:
                same = whole.half().float() == param
            else:
                (whole,) = FORMATS["bf16"].join([param.bfloat16()], [whole])
            param.copy_(torch.where(same, whole, param))


# -- what is refused ---------------------------------------------------------------------------------


def _refuse(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if not _has_hooks(optimizer):
        msg = (
            f"{kind} was made without Optimizer.__init__, so that torch runs no hook before its step, and it "
            "would step weights in 16 bits: hand over the optimizer that it wraps if it writes no weight "
            "itself, else use weights='fp32' with it"
        )
        raise TypeError(msg)
    if hasattr(optimizer, "fused_backward"):
        msg = (
            f"{kind} steps in backward, where weights are in 16 bits and small updates are lost: use "
            "weights='fp32' with it"
        )
        raise TypeError(msg)
    if getattr(optimizer, "parameters_as_bucket_view", False):
        msg = (
            f"{kind}(parameters_as_bucket_view=True) sends weights as parts of its own buckets, in 16 bits: "
            "leave parameters_as_bucket_view out"
        )
        raise ValueError(msg)


def _widen_fresh_state(optimizer: Optimizer) -> None:
    """Make float32 of state in 16 bits that is what a constructor makes: the same number everywhere."""
    for param, state in optimizer.state.items():
        if not isinstance(param, Tensor) or stored_weight(param) is None:
            continue
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
            state[name] = value.float()
