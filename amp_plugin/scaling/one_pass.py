"""A whole step of Adam, AdamW or SGD as one op, in place of ``optimizer.step``.

The op reads gradients once: it divides them by what they are still multiplied by, clips, writes them,
steps and stores; after an overflow it writes gradients only. Groups, state, counters, flags and hooks stay
torch's, so that a run may change between this and torch's own step at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.weights.compressed_state import CompressedState, asked_for
from amp_plugin.weights.weight import remainder_of, stored_params

_Group = dict[str, Any]
_Part = tuple[Callable[..., None], tuple[Any, ...], Tensor | None]  # an op, its options, lr on a GPU


def why_not(optimizer: Optimizer) -> str:
    """Return what keeps every step of an optimizer from being taken in one pass; empty if nothing does."""
    if type(optimizer) not in _RULES:
        return f"it is {type(optimizer).__name__}, not exactly Adam, AdamW or SGD of torch.optim"
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    missing = unavailable(next((param.device.type for param in params), "cpu"))
    if missing:
        return missing
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    if any(_is_on_device(beta) for group in optimizer.param_groups for beta in group.get("betas", ())):
        return "its betas are on a GPU"
    if _is_step_replaced(optimizer):
        return "its step was replaced"
    leave = all(getattr(hook, "leaves_steps", False) for hook in pre_hooks(optimizer))
    return "" if leave else "a hook runs before its step"


def unavailable(device_type: str) -> str:
    """Return why no step is taken in one pass on a type of device; empty if the ops run there."""
    if native_core().region is None:
        return f"the native core is not loaded: {native_core().reason}"
    if device_type == "cuda":
        core = cuda_core()
        return "" if core.loaded else f"the CUDA kernels are not loaded: {core.reason}"
    return "" if device_type == "cpu" else f"there is no op for {device_type}"


def collect(optimizer: Optimizer) -> OnePassStep | str:
    """Return all that a step needs, or why it cannot be taken in one pass now."""
    rule = _RULES[type(optimizer)]
    if sum(len(group["params"]) for group in optimizer.param_groups) > len(optimizer.state):
        _begin(optimizer, rule)
    parts: list[_Part] = []
    for group in optimizer.param_groups:
        try:
            for params, remainders in _by_storage(group["params"]):
                tensors = native_core().region.StepTensors(  # type: ignore[union-attr]
                    params, remainders, optimizer.state, rule.states(group), rule.counts
                )
                if len(tensors) > 0:
                    parts.append((getattr(tensors, rule.op), rule.options(group), _lr_on_device(group)))
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
            for call, options, lr in self._parts:
                call(*options, lr, divisor, found_inf)
            if skipped:
                return
            optimizer._opt_called = True  # type: ignore[attr-defined] # read by learning rate schedulers
            own = optimizer._optimizer_step_post_hooks
            for hook in chain(own.values(), _global_optimizer_post_hooks.values()):
                hook(optimizer, (optimizer,), {})


class _Rule(NamedTuple):
    """What an op needs of a group: the op's name, its states, whether steps are counted, its options."""

    op: str
    always: tuple[str, ...]  # names of its states
    with_option: tuple[str, str]  # an option, and the state that it asks for
    counts: bool
    options: Callable[[_Group], tuple[Any, ...]]

    def states(self, group: _Group) -> tuple[str, ...]:
        """Return the names of the group's states."""
        option, state = self.with_option
        return (*self.always, state) if group[option] else self.always


def _adam_options(group: _Group) -> tuple[Any, ...]:
    numbers = (_lr_on_host(group), *group["betas"], group["eps"], group["weight_decay"])
    return (*map(float, numbers), group["decoupled_weight_decay"], group["maximize"])


def _sgd_options(group: _Group) -> tuple[Any, ...]:
    numbers = (_lr_on_host(group), group["momentum"], group["dampening"], group["weight_decay"])
    return (*map(float, numbers), group["nesterov"], group["maximize"])


def _is_on_device(number: Any) -> bool:
    return isinstance(number, Tensor) and not number.is_cpu


def _lr_on_device(group: _Group) -> Tensor | None:
    """Return a learning rate that a GPU reads, without a host sync; None for one that the host knows."""
    lr = group["lr"]
    return lr if _is_on_device(lr) else None


def _lr_on_host(group: _Group) -> Any:
    return group["lr"] if _lr_on_device(group) is None else 0.0


_ADAM = _Rule("adam_", ("exp_avg", "exp_avg_sq"), ("amsgrad", "max_exp_avg_sq"), True, _adam_options)
_SGD = _Rule("sgd_", (), ("momentum", "momentum_buffer"), False, _sgd_options)
_RULES = {Adam: _ADAM, AdamW: _ADAM, SGD: _SGD}
OPTIMIZERS = tuple(kind.__name__ for kind in _RULES)
"""Names of the optimizers of ``torch.optim`` that there is an op for."""


def _begin(optimizer: Optimizer, rule: _Rule) -> None:
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
            made = {name: CompressedState.of(zeros, form, name) for name in rule.states(group)}
            if rule.counts:
                optimizer.state[param] = {"step": torch.zeros((), device=param.device), **made}
            elif made:
                optimizer.state[param] = made


def _by_storage(params: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield parameters that are stored as they are, then pairs with their low halves by dtype."""
    stored = stored_params(params)
    kept = [remainder_of(param) for param in stored]
    pairs = {param: remainder for param, remainder in zip(stored, kept, strict=True) if remainder is not None}
    yield [param for param in params if param not in pairs] if pairs else list(params), []
    for dtype in {remainder.dtype for remainder in pairs.values()}:  # bf16's are integers, fp16's masters
        yield [p for p in pairs if pairs[p].dtype is dtype], [r for r in pairs.values() if r.dtype is dtype]


def _is_step_replaced(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` is not torch's; schedulers may have wrapped it to count."""
    on_class: Any = type(optimizer).step
    on_instance = vars(optimizer).get("step", on_class)
    if getattr(on_instance, "_wrapped_by_lr_sched", False):
        on_instance = on_instance.__wrapped__
    inner = on_class.__wrapped__ if getattr(on_class, "hooked", False) else on_class
    of_torch = getattr(inner, "__globals__", {}).get("__name__") == Optimizer.__module__
    return not of_torch or on_instance is not on_class


def pre_hooks(optimizer: Optimizer) -> Iterator[Any]:
    """Return the hooks that run before an optimizer's step; a wrapper without Optimizer.__init__ has none."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return chain(_global_optimizer_pre_hooks.values(), own.values())
