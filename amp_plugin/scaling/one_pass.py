"""A whole step of an optimizer as one op, in place of ``optimizer.step``.

The op reads gradients once: it divides them by what they are still multiplied by, clips, writes them,
steps and stores; after an overflow it writes gradients only. Groups, state, counters, flags and hooks stay
torch's, so that a run may change between this and torch's own step at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.weights.compressed_state import CompressedState, asked_for
from amp_plugin.weights.weight import remainder_of, stored_params

_Group = dict[str, Any]
_Part = tuple[Callable[..., None], list[float], Tensor | None]  # the op, its rule's numbers, lr on a GPU


def why_not(optimizer: Optimizer) -> str:
    """Return what keeps every step of an optimizer from being taken in one pass; empty if nothing does."""
    if _class_of(optimizer) not in RULES:
        return f"there is no rule for the class {_class_of(optimizer)}"
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if missing := unavailable(next((param.device.type for param in params), "cpu")):
        return missing
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(map(_is_on_device, group.get("betas", ()))):
            return "differentiable=True" if group.get("differentiable") else "its betas are on a GPU"
    if _is_step_replaced(optimizer):
        return "its step was replaced"
    if not all(getattr(hook, "leaves_steps", False) for hook in pre_hooks(optimizer)):
        return "a hook runs before its step"
    return RULES[_class_of(optimizer)].unfit(optimizer)


def unavailable(device_type: str) -> str:
    """Return why no step is taken in one pass on a type of device; empty if the ops run there."""
    if not native_core().loaded:
        return f"the native core is not loaded: {native_core().reason}"
    if device_type == "cuda":
        core = cuda_core()
        return "" if core.loaded else f"the CUDA kernels are not loaded: {core.reason}"
    return "" if device_type == "cpu" else f"there is no op for {device_type}"


def collect(optimizer: Optimizer) -> OnePassStep | str:
    """Return all that a step needs, or why it cannot be taken in one pass now."""
    row = RULES[_class_of(optimizer)]
    if sum(len(group["params"]) for group in optimizer.param_groups) > len(optimizer.state):
        _begin(optimizer, row)
    parts: list[_Part] = []
    for group in optimizer.param_groups:
        rule, states = row.rule(group)
        numbers = [_number(group, option) for option in row.numbers]
        try:
            for params, remainders in _by_storage(group["params"]):
                tensors = native_core().extension.StepTensors(  # type: ignore[union-attr]
                    rule, len(numbers), params, remainders, optimizer.state, states, row.counters
                )
                if len(tensors) > 0:
                    parts.append((tensors.step_, numbers, _lr_on_device(group)))
        except ValueError as error:
            return str(error)
    return OnePassStep(optimizer, parts) if parts else "it has no gradients"


@dataclass
class OnePassStep:
    """The tensors of one step of an optimizer; to be taken before anything of it changes."""

    _optimizer: Optimizer
    _parts: list[_Part]

    def take(self, divisor: Tensor | None, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Divide the gradients and step, unless ``found_inf`` is 1; then run the optimizer's hooks."""
        optimizer = self._optimizer
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            for call, numbers, lr in self._parts:
                call(numbers, lr, divisor, found_inf)
            if skipped:
                return
            optimizer._opt_called = True  # type: ignore[attr-defined] # read by learning rate schedulers
            own = optimizer._optimizer_step_post_hooks
            for hook in chain(own.values(), _global_optimizer_post_hooks.values()):
                hook(optimizer, (optimizer,), {})


@dataclass(frozen=True, kw_only=True)
class _Row:
    """How the parameter groups of a class become calls of ``step_``.

    Attributes:
        rule: Takes a group. Returns the name of its rule, a key of ``kernels.reference.RULES``, and the names
            that the states of the rule have in the optimizer's state.
        numbers: The group options that are the numbers of the rule, in its order; ``"betas.0"`` for an item.
        counters: The names of the rule's counters in the optimizer's state.
        fixed: Options for which the rule has no number, with the value that they must have; names with a
            leading dot are attributes of the optimizer.
        ignored: Options that do not change the numbers of a step.
    """

    rule: Callable[[_Group], tuple[str, tuple[str, ...]]]
    numbers: tuple[str, ...]
    counters: tuple[str, ...] = ()
    fixed: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()

    def unfit(self, optimizer: Optimizer) -> str:
        """Return which option of an optimizer the rule does not have; empty if it has all.

        A later release of a package may add options, which change its step.
        """
        if self.fixed is None:  # a class of torch, whose options are known
            return ""
        known = {*(name.partition(".")[0] for name in self.numbers), *self.fixed, *self.ignored}
        for name in optimizer.defaults.keys() - known:
            return f"its option {name} is not known"
        for name, value in self.fixed.items():
            holders: Any = [vars(optimizer)] if name.startswith(".") else optimizer.param_groups
            given = [holder[name.lstrip(".")] for holder in holders if name.lstrip(".") in holder]
            own = getattr(sys.modules[type(optimizer).__module__], name.lstrip("."), None)
            if any(number != (own if value is _OWN else value) for number in given):
                return f"{name.lstrip('.')}={given[0]!r}"
        return ""


_OWN: Final = object()  # the function of this name in the class's module
_COUNTS: Final = ("step",)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def _adam(group: _Group) -> tuple[str, tuple[str, ...]]:
    return ("adam_amsgrad", (*_MOMENTS, "max_exp_avg_sq")) if group["amsgrad"] else ("adam", _MOMENTS)


def _sgd(group: _Group) -> tuple[str, tuple[str, ...]]:
    return ("sgd_momentum", ("momentum_buffer",)) if group["momentum"] else ("sgd", ())


def _lion(_: _Group) -> tuple[str, tuple[str, ...]]:
    return "lion", ("exp_avg",)


_LION: Final = ("lr", "betas.0", "betas.1", "weight_decay", "")
_ADAM: Final = ("lr", "betas.0", "betas.1", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
_SGD: Final = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

RULES: Final = {
    "torch.optim.adam.Adam": _Row(rule=_adam, numbers=_ADAM, counters=_COUNTS),
    "torch.optim.adamw.AdamW": _Row(rule=_adam, numbers=_ADAM, counters=_COUNTS),
    "torch.optim.sgd.SGD": _Row(rule=_sgd, numbers=_SGD),
    "lion_pytorch.lion_pytorch.Lion": _Row(
        rule=_lion, numbers=_LION, fixed={".decoupled_wd": False, ".update_fn": _OWN}
    ),
    "timm.optim.lion.Lion": _Row(
        rule=_lion,
        numbers=(*_LION[:-1], "maximize"),
        fixed={"caution": False, "corrected_weight_decay": False},
        ignored=("max_lr_snapshot", "foreach"),
    ),
}
"""The classes whose step is taken in one pass, by module and name."""
OPTIMIZERS: Final = tuple(name.rpartition(".")[2] for name in RULES)
"""The names of these classes alone."""


def _class_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _number(group: _Group, option: str) -> float:
    """Return a number of a group; 0 for a learning rate on a GPU, which the op reads there."""
    name, _, item = option.partition(".")
    if not name:  # a number that the class does not have
        return 0.0
    value = group[name][int(item)] if item else group[name]
    return 0.0 if _is_on_device(value) else float(value or 0.0)


def _is_on_device(number: Any) -> bool:
    return isinstance(number, Tensor) and not number.is_cpu


def _lr_on_device(group: _Group) -> Tensor | None:
    """Return a learning rate that a GPU reads, without a host sync; None for one that the host knows."""
    lr = group["lr"]
    return lr if _is_on_device(lr) else None


def _begin(optimizer: Optimizer, row: _Row) -> None:
    """Make the states that are to be compressed: zeros, as torch's own first step would, in float32."""
    for group in optimizer.param_groups:
        if group.get("dampening"):  # not for the first gradient, which torch takes whole
            continue
        for param in group["params"]:
            form = None if hasattr(param, "_local_tensor") else asked_for(param)  # DTensors: torch's own step
            counts_here = param.is_cpu or group.get("fused") or group.get("capturable")
            if form is None or param.grad is None or param in optimizer.state or not counts_here:
                continue
            zeros = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
            counts = {name: torch.zeros((), device=param.device) for name in row.counters}
            made = {name: CompressedState.of(zeros, form, name) for name in row.rule(group)[1]}
            if counts or made:
                optimizer.state[param] = {**counts, **made}


def _by_storage(params: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield parameters that are stored as they are, then pairs with their low halves by dtype."""
    stored = stored_params(params)
    kept = [remainder_of(param) for param in stored]
    pairs = {param: remainder for param, remainder in zip(stored, kept, strict=True) if remainder is not None}
    yield [param for param in params if param not in pairs] if pairs else list(params), []
    for dtype in {remainder.dtype for remainder in pairs.values()}:  # bf16's are integers, fp16's masters
        yield [p for p in pairs if pairs[p].dtype is dtype], [r for r in pairs.values() if r.dtype is dtype]


def _is_step_replaced(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` is not the one of its class's module.

    Schedulers may have wrapped it to count, torch to run hooks and without autograd.
    """
    on_class: Any = type(optimizer).step
    on_instance = vars(optimizer).get("step", on_class)
    if getattr(on_instance, "_wrapped_by_lr_sched", False):
        on_instance = on_instance.__wrapped__
    owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    layer, modules = on_class, {owner.__module__, Optimizer.__module__, _CONTEXTS}
    while hasattr(layer, "__wrapped__"):
        if getattr(layer, "__globals__", {}).get("__name__") not in modules:
            return True
        layer = layer.__wrapped__
    is_own = getattr(layer, "__globals__", {}).get("__name__") == owner.__module__
    return not is_own or layer.__qualname__ != f"{owner.__qualname__}.step" or on_instance is not on_class


_CONTEXTS: Final = "torch.utils._contextlib"  # where torch.no_grad makes a function of another


def pre_hooks(optimizer: Optimizer) -> Iterator[Any]:
    """Return the hooks that run before an optimizer's step; a wrapper without Optimizer.__init__ has none."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return chain(_global_optimizer_pre_hooks.values(), own.values())
