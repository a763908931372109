"""Takes a whole optimizer step with a single op, instead of calling ``optimizer.step``.

The op reads each gradient once, divides it by the loss scale, clips it and writes it back. The op also
updates the parameters, and writes them in the format in which they are stored. After an overflow, the op
still writes the unscaled gradients back, but leaves parameters and states unchanged. The step uses torch's
own parameter groups, states, step counters and hooks, so a program can switch between this op and
``optimizer.step`` at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from amp_plugin.quiet_hooks import has_only_quiet_hooks
from amp_plugin.weights import muon
from amp_plugin.weights.compressed_state import MOMENTS, CompressedState, asked_for
from amp_plugin.weights.optimizer_hooks import add_if_late, count_steps, take_steps_by
from amp_plugin.weights.shard import with_local
from amp_plugin.weights.weight import (
    half_of,
    is_kept_alone,
    masters_of,
    remainder_of,
    store_masters_,
    stored_params,
)

_Group = dict[str, Any]
# One op call made by a step, as a tuple of the op's function, its hyperparameters and the learning rate.
# The learning rate is None unless it is a tensor on a GPU.
_Part = tuple[Callable[..., None], list[float], Tensor | None]


def why_not(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot step in one pass, or ``""`` if it can."""
    if _class_of(optimizer) not in RULES:
        return f"there is no rule for the class {_class_of(optimizer)}"
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    device_type = next((param.device.type for param in params), "cpu")
    missing = unavailable(device_type)
    if missing or (device_type != "cpu" and RULES[_class_of(optimizer)].schedule is not None):
        return missing or (
            "its step count is kept on the CPU, which does not know at once whether a step on the GPU was "
            "skipped"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(map(_is_on_device, group.get("betas", ()))):
            return "differentiable=True" if group.get("differentiable") else "its betas are on a GPU"
    if _is_step_replaced(optimizer):
        return "its step was replaced"
    if not has_only_quiet_hooks(optimizer):
        return "a hook runs before its step"
    return RULES[_class_of(optimizer)].unfit(optimizer)


def unavailable(device_type: str) -> str:
    """Return the reason why ops for one-pass steps do not run on a device type, or ``""`` if they do."""
    if not native_core().loaded:
        return f"the native core is not loaded: {native_core().reason}"
    if device_type == "cuda":
        core = cuda_core()
        return "" if core.loaded else f"the CUDA kernels are not loaded: {core.reason}"
    return "" if device_type == "cpu" else f"there is no op for {device_type}"


def collect(optimizer: Optimizer) -> OnePassStep:
    """Collect the tensors and numbers of the next step. Call this only if :func:`why_not` returns ``""``.

    Raises:
        ValueError: This step cannot be taken in one pass. The message gives the reason.
    """
    row = RULES[_class_of(optimizer)]
    if sum(len(group["params"]) for group in optimizer.param_groups) > len(optimizer.state):
        _begin(optimizer, row)
    parts: list[_Part] = []
    changed: list[tuple[_Group, _Group]] = []
    for group in optimizer.param_groups:
        rule, states = row.rule(group)
        changes = {} if row.schedule is None else row.schedule(group)
        if changes:
            changed.append((group, {name: value for name, value in changes.items() if name in group}))
        numbers = [_number({**group, **changes}, option) for option in row.numbers]
        for params, remainders in _by_storage(group["params"]):
            if remainders:
                add_if_late(optimizer)
            tensors = native_core().extension.StepTensors(  # type: ignore[union-attr]
                rule, len(numbers), params, remainders, optimizer.state, states, row.counters
            )
            if len(tensors) > 0:
                call = row.call(tensors, group)
                if is_kept_alone(params[0]):
                    call = _and_rounded(call, optimizer, params, remainders)
                parts.append((call, numbers, _lr_on_device(group)))
    if not parts:
        msg = "it has no gradients"
        raise ValueError(msg)
    return OnePassStep(optimizer, parts, changed)


@dataclass
class OnePassStep:
    """A prepared optimizer step, which is valid until the optimizer or its gradients change."""

    _optimizer: Optimizer
    _parts: list[_Part]
    # The parameter groups whose options the step changes, together with the new values.
    _changed: list[tuple[_Group, _Group]]

    def run(self, divisor: Tensor | None, found_inf: Tensor | None, *, skipped: bool | None) -> None:
        """Divide the gradients by ``divisor``, and take the step unless ``found_inf`` is 1."""
        for call, numbers, lr in self._parts:
            call(numbers, lr, divisor, found_inf)
        if not skipped:
            for group, changes in self._changed:
                group.update(changes)

    def take(self, divisor: Tensor | None, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Call :meth:`run`. Unless the step is skipped, also call the optimizer's post-step hooks."""
        optimizer = self._optimizer
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            self.run(divisor, found_inf, skipped=skipped)
            if skipped:
                return
            # Learning rate schedulers read this attribute.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            own = optimizer._optimizer_step_post_hooks
            for hook in chain(own.values(), _global_optimizer_post_hooks.values()):
                hook(optimizer, (optimizer,), {})


@contextmanager
def own_step(optimizer: Optimizer) -> Iterator[None]:
    """In a ``with`` block, let an optimizer with compressed states run its own step, not a one-pass step."""
    key = id(optimizer)
    _own.add(key)
    try:
        yield
    finally:
        _own.discard(key)


def takes_own_step(optimizer: Optimizer) -> bool:
    """Return whether a block of :func:`own_step` is active for an optimizer."""
    return id(optimizer) in _own


_own: set[int] = set()


def take_bare_step(optimizer: Optimizer) -> list[Tensor]:
    """Take a one-pass step when the user calls ``optimizer.step()`` without a loss scale.

    ``take_bare_step`` runs before the optimizer's own step. A one-pass step saves memory, because the
    optimizer's own step needs the decompressed states of all parameters at the same time.

    Returns:
        The parameters that were updated. The caller hides the gradients of the returned parameters, so that
        the optimizer's own step does nothing. The list is empty if the step cannot be taken in one pass.
    """
    if takes_own_step(optimizer) or why_not(optimizer):
        return []
    try:
        step = collect(optimizer)
    except ValueError:
        return []
    step.run(None, None, skipped=False)
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


take_steps_by(take_bare_step)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Describes how the parameter groups of an optimizer class are turned into calls to the op ``step_``.

    Attributes:
        rule: A function that takes a parameter group and returns the name of its rule, which is a key of
            ``kernels.reference.RULES``. The function also returns the names of the optimizer states that the
            rule updates.
        numbers: The options of a parameter group that are passed to the rule as numbers, in order.
            ``"betas.0"`` is the first item of ``betas``.
        counters: The names of the step counters that the rule updates.
        fixed: Maps each option that the rule does not support to the only value that it may have. A name with
            a leading dot names an attribute of the optimizer. ``fixed`` is None for torch's own optimizer
            classes, whose options are all known.
        ignored: Options that do not change the result of a step.
        schedule: A function that computes the numbers that the rule needs, including numbers that change at
            each step, such as the step count. With a ``schedule``, one-pass steps are possible only on the
            CPU, because the host must know immediately whether a step was skipped. The function raises
            ValueError if the step cannot be taken in one pass.
        call: A function that takes the tensors and the parameter group, and returns another function that
            takes the step. A step is one op, or several ops with torch's own computations between the ops.
        why_not: A function that returns the reason why this torch release does not support the class, or
            ``""`` if it does.
    """

    rule: Callable[[_Group], tuple[str, tuple[str, ...]]]
    numbers: tuple[str, ...]
    counters: tuple[str, ...] = ()
    fixed: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()
    schedule: Callable[[_Group], _Group] | None = None
    call: Callable[[Any, _Group], Callable[..., None]] = lambda tensors, _: tensors.step_
    why_not: Callable[[], str] = str

    def unfit(self, optimizer: Optimizer) -> str:
        """Return an optimizer option that the rule does not support, or ``""`` if it supports all options.

        Unknown options are not supported, because a later release of a package may add options that change
        the step.
        """
        if self.why_not() or self.fixed is None:
            return self.why_not()
        known = {*(name.partition(".")[0] for name in self.numbers), *self.fixed, *self.ignored}
        for name in optimizer.defaults.keys() - known:
            return f"its option {name} is not known"
        for name, value in self.fixed.items():
            holders: Any = [vars(optimizer)] if name.startswith(".") else optimizer.param_groups
            given = [holder[name.lstrip(".")] for holder in holders if name.lstrip(".") in holder]
            own = getattr(sys.modules.get(type(optimizer).__module__), name.lstrip("."), None)
            if any(number != (own if value is _OWN else value) for number in given):
                return f"{name.lstrip('.')}={given[0]!r}"
        return ""


# In ``fixed``, _OWN stands for the function in the optimizer's module that has the same name as the option.
_OWN: Final = object()
_COUNTS: Final = ("step",)
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def _adam(group: _Group) -> tuple[str, tuple[str, ...]]:
    return ("adam_amsgrad", (*_MOMENTS, "max_exp_avg_sq")) if group["amsgrad"] else ("adam", _MOMENTS)


def _sgd(group: _Group) -> tuple[str, tuple[str, ...]]:
    return ("sgd_momentum", ("momentum_buffer",)) if group["momentum"] else ("sgd", ())


def _rmsprop(group: _Group) -> tuple[str, tuple[str, ...]]:
    centered, momentum = bool(group["centered"]), group["momentum"] > 0
    states = ("square_avg", *["grad_avg"] * centered, *["momentum_buffer"] * momentum)
    return "rmsprop" + "_centered" * centered + "_momentum" * momentum, states


def _named(rule: str, *states: str) -> Callable[[_Group], tuple[str, tuple[str, ...]]]:
    return lambda _: (rule, states)


def _count(group: _Group) -> _Group:
    """Return the step count of a parameter group after the step."""
    if "step" not in group:
        msg = "a parameter group has no step count before the first step"
        raise ValueError(msg)
    return {"step": group["step"] + 1}


def _schedule(group: _Group) -> _Group:
    """Return a group's options after a step of AdamWScheduleFree, and other numbers that its op needs."""
    if not group["train_mode"]:
        msg = "it is not in train mode"
        raise ValueError(msg)
    k, warmup, (beta1, beta2) = group["k"], group["warmup_steps"], group["betas"]
    lr = float(group["lr"]) * ((k + 1) / warmup if k < warmup else 1.0)
    lr_max = max(lr, group["lr_max"])
    weight = (k + 1) ** group["r"] * lr_max ** group["weight_lr_power"]
    weight_sum = group["weight_sum"] + weight
    share = weight / weight_sum if weight_sum else 0.0
    changes = {"k": k + 1, "scheduled_lr": lr, "lr_max": lr_max, "weight_sum": weight_sum, "share": share}
    return {**changes, "correction2": 1 - beta2 ** (k + 1), "y_step": lr * (beta1 * (1 - share) - 1)}


_SCHEDULE_FREE: Final = (
    *("scheduled_lr", "betas.1", "eps", "weight_decay", "correction2", "share", "y_step", "k"),
)
_RMSPROP: Final = ("lr", "alpha", "eps", "weight_decay", "maximize", "momentum")
_LION: Final = ("lr", "betas.0", "betas.1", "weight_decay", "")
_ADAM: Final = ("lr", "betas.0", "betas.1", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
_SGD: Final = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

RULES: Final = {
    "torch.optim.adam.Adam": _Row(rule=_adam, numbers=_ADAM, counters=_COUNTS),
    "torch.optim.adamw.AdamW": _Row(rule=_adam, numbers=_ADAM, counters=_COUNTS),
    "torch.optim.sgd.SGD": _Row(rule=_sgd, numbers=_SGD),
    "torch.optim.rmsprop.RMSprop": _Row(rule=_rmsprop, numbers=_RMSPROP, counters=_COUNTS),
    "torch.optim.adagrad.Adagrad": _Row(
        rule=_named("adagrad", "sum"),
        numbers=("lr", "lr_decay", "eps", "weight_decay", "maximize"),
        counters=_COUNTS,
    ),
    "torch.optim.adadelta.Adadelta": _Row(
        rule=_named("adadelta", "square_avg", "acc_delta"),
        numbers=("lr", "rho", "eps", "weight_decay", "maximize"),
        counters=_COUNTS,
    ),
    "torch.optim.nadam.NAdam": _Row(
        rule=_named("nadam", *_MOMENTS), numbers=(*_ADAM, "momentum_decay"), counters=(*_COUNTS, "mu_product")
    ),
    "torch.optim.radam.RAdam": _Row(rule=_named("radam", *_MOMENTS), numbers=_ADAM, counters=_COUNTS),
    "torch.optim.adamax.Adamax": _Row(
        rule=_named("adamax", "exp_avg", "exp_inf"),
        numbers=("lr", "betas.0", "betas.1", "eps", "weight_decay", "maximize"),
        counters=_COUNTS,
    ),
    "torch.optim._muon.Muon": _Row(
        rule=_named("muon_momentum", "momentum_buffer"),
        numbers=("lr", "momentum", "nesterov"),
        fixed={},
        ignored=("weight_decay", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
        call=muon.step_of,
        why_not=muon.why_not,
    ),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": _Row(
        rule=_named("schedule_free", "exp_avg_sq", "z"),
        numbers=_SCHEDULE_FREE,
        schedule=_schedule,
        fixed={},
        ignored=(
            "lr",
            "r",
            "warmup_steps",
            "train_mode",
            "weight_sum",
            "lr_max",
            "weight_lr_power",
            "foreach",
        ),
    ),
    "lion_pytorch.lion_pytorch.Lion": _Row(
        rule=_named("lion", "exp_avg"), numbers=_LION, fixed={".decoupled_wd": False, ".update_fn": _OWN}
    ),
    "timm.optim.lion.Lion": _Row(
        rule=_named("lion", "exp_avg"),
        numbers=(*_LION[:-1], "maximize"),
        fixed={"caution": False, "corrected_weight_decay": False},
        ignored=("max_lr_snapshot", "foreach"),
    ),
    "pytorch_optimizer.optimizer.lion.Lion": _Row(
        rule=_named("lion", "exp_avg"),
        numbers=_LION,
        schedule=_count,
        fixed={
            "weight_decouple": True,
            **dict.fromkeys(("fixed_decay", "use_gc", "adanorm", "cautious", ".maximize"), False),
        },
        ignored=("foreach", "step"),
    ),
}
"""Maps each optimizer class that can step in one pass (module and name) to its row."""
OPTIMIZERS: Final = tuple(
    ("" if name.startswith("torch.") else f"{name.partition('.')[0]}.") + name.rpartition(".")[2]
    for name in RULES
)
"""The names of the classes in RULES. Classes outside of torch have their package as a prefix."""


def _class_of(optimizer: Optimizer) -> str:
    return f"{_module_of(type(optimizer))}.{type(optimizer).__qualname__}"


def _module_of(kind: type) -> str:
    """Return the module that defines a class.

    For torch's Muon, ``__module__`` is ``torch.optim``, which is not the module that defines Muon.
    """
    return "torch.optim._muon" if kind is torch.optim.Muon else kind.__module__


def _number(group: _Group, option: str) -> float:
    """Return an option of a parameter group as a number, or 0 for a learning rate that is on a GPU."""
    name, _, item = option.partition(".")
    # The name is empty if the optimizer class has no option for a hyperparameter of its update rule.
    if not name:
        return 0.0
    value = group[name][int(item)] if item else group[name]
    return 0.0 if _is_on_device(value) else float(value or 0.0)


def _is_on_device(number: Any) -> bool:
    return isinstance(number, Tensor) and not number.is_cpu


def _lr_on_device(group: _Group) -> Tensor | None:
    """Return the learning rate if it is a tensor on a GPU, or None if it is on the CPU.

    If the learning rate is on the GPU, the op reads it there, without a host sync.
    """
    lr = group["lr"]
    return lr if _is_on_device(lr) else None


def _begin(optimizer: Optimizer, row: _Row) -> None:
    """Create compressed zero moments for parameters without state, as the optimizer's first step would.

    If a rule has states that are not moments, this function creates no states at all. The optimizer's own
    first step then creates all states. The reason is that states other than moments may start with values
    other than zero, such as a copy of the weight.
    """
    for group in optimizer.param_groups:
        names = row.rule(group)[1]
        if group.get("dampening") or not {*names} <= {*MOMENTS}:
            # torch does not dampen the first gradient, so starting from zeros would be wrong.
            continue
        for param in group["params"]:
            form = asked_for(param)
            counts_here = param.is_cpu or group.get("fused") or group.get("capturable")
            if form is None or param.grad is None or param in optimizer.state or not counts_here:
                continue
            zeros = torch.zeros_like(half_of(param), dtype=torch.float32)
            counts = {
                name: torch.full((), float(name == "mu_product"), device=param.device)
                for name in row.counters
            }
            made = {name: with_local(param, CompressedState.of(zeros, form, name)) for name in names}
            if counts or made:
                optimizer.state[param] = {**counts, **made}


def _by_storage(params: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield groups of parameters with the same storage format, each with a list of further tensors.

    - Float32 parameters come first. For float32 parameters, the list of further tensors is empty.
    - 16-bit parameters with remainders come next, grouped by the dtype of their remainders. A remainder holds
      the bits of a float32 value that do not fit into the 16-bit parameter. The list of further tensors holds
      the remainders of the group.
    - 16-bit parameters without remainders come last. For the last group, the list of further tensors holds
      float32 copies of the parameters.
    """
    stored = stored_params(params)
    alone = [param for param in stored if param.grad is not None and is_kept_alone(param)]
    kept = [remainder_of(param) for param in stored]
    pairs = {param: remainder for param, remainder in zip(stored, kept, strict=True) if remainder is not None}
    in_16_bits = {*pairs, *filter(is_kept_alone, stored)}
    yield [param for param in params if param not in in_16_bits] if in_16_bits else list(params), []
    # The remainder of a bfloat16 weight is int16. For a float16 weight, a full float32 copy is stored.
    for dtype in {remainder.dtype for remainder in pairs.values()}:
        yield [p for p in pairs if pairs[p].dtype is dtype], [r for r in pairs.values() if r.dtype is dtype]
    if alone:
        yield alone, masters_of(alone)


def _and_rounded(
    call: Callable[..., None], optimizer: Optimizer, params: list[Tensor], masters: list[Tensor]
) -> Callable[..., None]:
    """Return a function that updates the float32 copies, and then stores them with stochastic rounding."""

    def run(
        numbers: list[float], lr: Tensor | None, divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        count_steps(optimizer, params)  # before the step increases the count
        call(numbers, lr, divisor, found_inf)
        if found_inf is None or not found_inf.is_cpu or found_inf.item() == 0:
            # The weights are rounded unless the host knows that the step was skipped.
            store_masters_(params, masters)

    return run


def _is_step_replaced(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` is no longer the function that the optimizer's class defines.

    Torch wraps ``step`` for hooks and ``no_grad``, and learning rate schedulers wrap ``step`` to count steps.
    These wrappers do not count as replacements.
    """
    on_class: Any = type(optimizer).step
    on_instance = vars(optimizer).get("step", on_class)
    if getattr(on_instance, "_wrapped_by_lr_sched", False) is True:  # `is True`: a mock has every attribute
        on_instance = on_instance.__wrapped__
    # torch wraps step() to run hooks, and sets the wrapper on the class, even if a base class defines step().
    kinds = type(optimizer).__mro__
    layer, modules = on_class, {_CONTEXTS, *map(_module_of, kinds)}
    names = {f"{_module_of(kind)}.{kind.__qualname__}.step" for kind in kinds}
    while hasattr(layer, "__wrapped__"):
        if getattr(layer, "__globals__", {}).get("__name__") not in modules:
            return True
        layer = layer.__wrapped__
    module = getattr(layer, "__globals__", {}).get("__name__")
    return f"{module}.{getattr(layer, '__qualname__', '')}" not in names or on_instance is not on_class


# The torch module that defines the wrapper function of torch.no_grad.
_CONTEXTS: Final = "torch.utils._contextlib"
