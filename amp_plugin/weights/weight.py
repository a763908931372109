"""Parameters that are stored in 16 bits, and become float32 while an optimizer uses them.

A parameter can be in these states:

- *Stored*. The parameter is a 16-bit tensor, and its StoredWeight holds the remainder. The remainder holds
  those bits of the float32 value that do not fit into the 16-bit tensor.
- *Shown*. The parameter is a float32 tensor. The Python object stays the same, and only its data is replaced.
- *Nested*. :func:`show_fp32` was called several times. The parameter is stored in 16 bits again after the
  last matching call to :func:`hide_fp32`.
- *Sharded*. The parameter is a float32 DTensor. The local shard of the DTensor is a StoredShard, or an
  ordinary float32 tensor while an optimizer uses the parameter.

Optimizers hold the parameter in their groups and states, and see float32 values whenever they use the
parameter. Autograd and DDP see the 16-bit tensor. A StoredWeight, which holds the remainder, is an attribute
of the parameter. Copying or unpickling a stored parameter gives an ordinary float32 parameter. A frozen
16-bit parameter is converted to its storage format as soon as it becomes trainable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from amp_plugin.messages import warn_user
from amp_plugin.weights.formats import FORMATS, HALVES, SplitBf16
from amp_plugin.weights.shard import StoredShard, local_of, set_local_, with_local

_ATTRIBUTE: Final = "_amp_plugin_stored"
# The original descriptors of torch.Tensor, which subclasses override.
_GRAD: Final[Any] = Tensor.grad
_DATA: Final[Any] = Tensor.data
_REQUIRES_GRAD: Final[Any] = Tensor.requires_grad


@dataclass(eq=False, slots=True)
class StoredWeight:
    """Holds the bits of a float32 parameter that its 16-bit weight lacks (the remainder).

    A StoredWeight also records whether the parameter is float32 now.
    """

    # The name of the storage format, which is a key of FORMATS.
    name: str
    # The remainder. If the parameter is moved to another device, the next use moves the remainder too.
    kept: Tensor
    seed: int  # the seed of stochastic rounding
    # A weak reference to the parameter. While it exists, torch.utils.swap_tensors raises an error.
    # The error is intended, because swapping tensors would remove the StoredWeight from the parameter.
    owner: ref[Tensor] | None
    steps: int = 0  # number of optimizer steps taken
    shows: int = 0  # the number of open show_fp32() requests
    # The 16-bit tensor or StoredShard while the parameter is float32, else None.
    hidden: Tensor | None = None
    # The weight's key in the last state dict, and a reference to the tensor under this key.
    exported: tuple[str, Callable[[], Any]] = "", bool

    @property
    def format(self) -> SplitBf16:
        """The storage format."""
        return FORMATS[self.name]

    def show(self, param: Tensor, master: Tensor) -> None:
        """Replace the 16-bit data of the parameter with its float32 value."""
        if is_sharded(param):
            self.hidden = local_of(param)
            set_local_(param, master)
        else:
            self.hidden = nn.Parameter(master, param.requires_grad)
            _exchange(param, self.hidden, nn.Parameter)

    def half_like(self, master: Tensor) -> Tensor:
        """Return the parameter's 16-bit tensor, in the shape and on the device of the float32 ``master``."""
        hidden = cast("Tensor", self.hidden)
        if hidden.device != master.device or hidden.shape != master.shape:
            if isinstance(hidden, StoredShard):
                self.hidden = hidden = StoredShard.of(master, self.name, self.seed)
                self.kept = hidden.kept
            else:
                hidden.data = torch.empty_like(master, dtype=hidden.dtype)
        return half_of(hidden)

    def hide(self, param: Tensor) -> None:
        """Put the 16-bit data of a parameter back in place of the float32 data."""
        hidden, self.hidden = cast("Tensor", self.hidden), None
        if is_sharded(param):
            set_local_(param, hidden)
        else:
            hidden.requires_grad_(param.requires_grad)
            _exchange(param, hidden, StoredParameter)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the StoredWeight out of pickles, which contain an ordinary float32 parameter instead."""
        return bool, ()


def _set_grad(param: Tensor, given: Tensor | None) -> None:
    """Set the gradient. A gradient in the weight's 16-bit dtype is converted to float32."""
    _GRAD.__set__(param, given.float() if given is not None and given.dtype is param.dtype else given)


def _set_data(param: Tensor, given: Tensor) -> None:
    """Set the data of a stored parameter. Float32 data is stored exactly.

    If the data is only a float32 cast of the 16-bit weight, for example from ``model.float()``, the data is
    not stored. The next use of the parameter then raises an error, because the cast has lost the low bits of
    the float32 value.
    """
    if given.dtype is torch.float32 and given.shape == param.shape and given.device == param.device:
        present = _DATA.__get__(param).float()
        if not torch.equal(given, present) or torch.equal(present, exact_value(param)):
            weight = _settled(param)
            given, weight.kept = weight.format.split(given)
    _DATA.__set__(param, given)


class StoredParameter(nn.Parameter):
    """The class of a parameter while it is stored in 16 bits."""

    grad: Any = property(_GRAD.__get__, _set_grad, _GRAD.__delete__)
    data: Any = property(_DATA.__get__, _set_data)

    def share_memory_(self) -> Any:
        """Move the parameter and its remainder to shared memory, for other processes."""
        _settled(self).kept.share_memory_()  # type: ignore[no-untyped-call]
        return super().share_memory_()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary float32 parameter."""
        return nn.Parameter(exact_value(self), self.requires_grad)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle the parameter as an ordinary float32 parameter, which can be loaded without amp_plugin."""
        made: Any = nn.Parameter(exact_value(self), self.requires_grad)
        vars(made).update({name: value for name, value in vars(self).items() if name != _ATTRIBUTE})
        return made.__reduce_ex__(protocol)  # type: ignore[no-any-return]


def _set_requires_grad(param: nn.Parameter, wanted: bool) -> None:
    """Set ``requires_grad``. A frozen parameter that becomes trainable gets the format chosen for it.

    A copy of a frozen parameter has no chosen format, so the copy becomes float32 when it becomes trainable.
    """
    if wanted:
        name, seed = vars(param).get("once_trained", ("fp32", 0))
        forget_way_(param)
        if param.untyped_storage().nbytes() == param.nbytes:  # not for views of FSDP's flat tensor
            store_(param, name, seed=seed)
    _REQUIRES_GRAD.__set__(param, wanted)


class FrozenParameter(nn.Parameter):
    """A frozen 16-bit parameter, which is converted to its storage format when it becomes trainable."""

    requires_grad: Any = property(_REQUIRES_GRAD.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenParameter:
        """Freeze the parameter, or make it trainable and convert it to its storage format."""
        self.requires_grad = requires_grad
        return self


def stored_weight(param: Tensor) -> StoredWeight | None:
    """Return the StoredWeight of a stored parameter, or None for an ordinary parameter."""
    known: StoredWeight | None = param.__dict__.get(_ATTRIBUTE) or None
    if (
        known is None
        and type(param) is not nn.Parameter
        and isinstance(shard := local_of(param), StoredShard)
    ):
        known = record_shard_(param, shard)
    return known


def stored_params(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that are stored in 16 bits, without duplicates."""
    # Ordinary parameters, which are the most common, are skipped here without a function call.
    # A function call would take about as long as the optimizer step of a small parameter.
    likely = [p for p in params if type(p) is not nn.Parameter or _ATTRIBUTE in p.__dict__]
    return list(dict.fromkeys(param for param in likely if stored_weight(param) is not None))


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, of which this rank may hold only a shard."""
    return local_of(param) is not param


def half_of(param: Tensor) -> Tensor:
    """Return the 16-bit tensor of a stored parameter, or of this rank's shard of the parameter."""
    local = local_of(param)
    return local.weight_16 if isinstance(local, StoredShard) else local.detach()


def is_unstored_half(param: Tensor) -> bool:
    """Return whether a parameter is in 16 bits although store_weights has not stored it."""
    return param.dtype in HALVES and stored_weight(param) is None


# -- storing and restoring -------------


@torch.no_grad()
def store_(param: nn.Parameter, name: str, *, seed: int = 0) -> None:
    """Store a parameter exactly and in place, in the format ``FORMATS[name]`` or as float32 (``"fp32"``)."""
    known = stored_weight(param)
    if known is not None and known.name == name:
        return
    if known is not None or (name == "fp32" and param.dtype in HALVES):
        widen_(param)
    if name == "fp32":
        return
    if is_sharded(param):
        shard = StoredShard.of(local_of(param), name, seed)
        set_local_(param, shard)
        record_shard_(param, shard)
        return
    grad, param.grad = param.grad, None
    value, kept = FORMATS[name].split(param.detach().float())
    param.data = value
    param.grad_dtype = torch.float32
    param.__class__ = StoredParameter
    setattr(param, _ATTRIBUTE, StoredWeight(name, kept, seed, ref(param)))
    if grad is not None:
        param.grad = grad.float()


def record_shard_(param: Tensor, shard: StoredShard) -> StoredWeight:
    """Create and return the StoredWeight of a stored parameter that is sharded."""
    # Module.to() swaps DTensors, which raises an error if a weak reference to one of them exists.
    # The DTensor that the swap creates gets a new StoredWeight, made from its local shard.
    weight = StoredWeight(shard.form, shard.kept, shard.seed, None)
    setattr(param, _ATTRIBUTE, weight)
    return weight


def store_once_trained_(param: Tensor, name: str, *, seed: int = 0) -> None:
    """Arrange for a frozen 16-bit parameter to be stored as soon as it becomes trainable."""
    if type(param) in {nn.Parameter, FrozenParameter}:
        param.__class__ = FrozenParameter
        vars(param)["once_trained"] = name, seed


def forget_way_(param: Tensor) -> None:
    """Undo :func:`store_once_trained_`."""
    if isinstance(param, FrozenParameter):
        vars(param).pop("once_trained", None)
        param.__class__ = nn.Parameter  # type: ignore[assignment]


@torch.no_grad()
def widen_(param: Tensor) -> None:
    """Turn a 16-bit parameter into an ordinary float32 parameter, in place. Stored values stay exact."""
    value, grad = exact_value(param), param.grad
    if is_sharded(param):
        set_local_(param, local_of(value))
        param.__dict__.pop(_ATTRIBUTE, None)
        return
    param.grad = None
    forget_way_(param)
    if param.__dict__.pop(_ATTRIBUTE, None) is not None:
        param.__class__ = nn.Parameter
    param.data = value
    param.grad = None if grad is None else grad.float()


# -- reading ---------------------------


@torch.no_grad()
def exact_value(param: Tensor) -> Tensor:
    """Return the exact value of a parameter as a new float32 tensor.

    If the GPU is nearly full, the new tensor is on the CPU.
    """
    weight = stored_weight(param)
    if weight is None or _settled(param).shows:
        return param.detach().to(torch.float32, copy=True)
    local = local_of(param)
    if isinstance(local, StoredShard):
        return with_local(param, local.decoded())
    device = param.device if has_room(param) else torch.device("cpu")
    (value,) = weight.format.join([param.detach().to(device)], [weight.kept.to(device)])
    return value.clone() if value.data_ptr() == weight.kept.data_ptr() else value


def has_room(param: Tensor) -> bool:
    """Return whether a float32 copy of a parameter would leave at least 1/8 of the GPU's memory free."""
    if param.device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(param.device)
    cached = torch.cuda.memory_reserved(param.device) - torch.cuda.memory_allocated(param.device)
    return free + cached - 4 * param.numel() > total // 8


def remainder_of(param: Tensor) -> Tensor | None:
    """Return the bits of a float32 parameter that its 16-bit weight lacks (the remainder).

    The remainder of a float16 weight is a full float32 copy. Return None if the parameter is not in 16 bits
    now, or if it has no remainder.
    """
    weight = stored_weight(param)
    if weight is None or weight.shows or not weight.format.kept_bytes:
        return None
    # no_grad() is not used as a decorator, because most calls return before this line.
    with torch.no_grad():
        kept = _settled(param).kept
        if kept.dtype is torch.float32:
            # User code may have changed the float16 weight. join() updates the float32 copy.
            weight.format.join([half_of(param)], [kept])
    return kept


def is_kept_alone(param: Tensor) -> bool:
    """Return whether only the 16-bit weight of a parameter is stored, as with stochastic rounding."""
    weight = stored_weight(param)
    return weight is not None and not weight.shows and not weight.format.kept_bytes


@torch.no_grad()
def masters_of(params: list[Tensor]) -> list[Tensor]:
    """Return float32 copies of parameters that are stored only as 16-bit weights, without remainders."""
    records = [_settled(param) for param in params]
    return records[0].format.join([half_of(param) for param in params], [record.kept for record in records])


@torch.no_grad()
def store_masters_(params: list[Tensor], masters: list[Tensor]) -> None:
    """Store the float32 copies that :func:`masters_of` returned, after an optimizer step has changed them."""
    made = dict(zip(params, masters, strict=True))
    records = {param: _settled(param) for param in params}
    for record in records.values():
        record.steps += 1
    for alike, group in _alike(records):
        halves, kept = [half_of(param) for param in alike], [record.kept for record in group]
        group[0].format.store([made[p] for p in alike], halves, kept, group[0].seed, group[0].steps)


def _settled(param: Tensor) -> StoredWeight:
    """Return the StoredWeight of a parameter, updated if the parameter was moved or resized."""
    weight = cast("StoredWeight", stored_weight(param))
    if is_sharded(param):
        return weight if weight.shows else _settled_shard(param, weight)
    wanted = torch.float32 if weight.shows else weight.format.dtype
    if param.dtype is not wanted:
        msg = (
            f"a weight of shape {tuple(param.shape)} that was stored with weights={weight.name!r} is in "
            f"{param.dtype} now: the model was converted (model.float(), model.half(), model.to(dtype)), "
            "which has rounded it. Call amp_plugin.restore_weights(model) before that"
        )
        raise RuntimeError(msg)
    if weight.kept.device != param.device:
        weight.kept = weight.kept.to(param.device)
    if weight.kept.shape != param.shape and weight.format.kept_bytes:
        _, weight.kept = weight.format.split(param.detach().float())
    return weight


def _settled_shard(param: Tensor, weight: StoredWeight) -> StoredWeight:
    """Return the StoredWeight of a sharded parameter, updated if torch has replaced the local shard."""
    shard = local_of(param)
    if not isinstance(shard, StoredShard):
        shard = StoredShard.of(shard.float(), weight.name, weight.seed)
        set_local_(param, shard)
    weight.kept = shard.kept
    return weight


# -- showing and hiding ----------------


@torch.inference_mode(mode=False)
@torch.no_grad()
def show_fp32(params: Iterable[Tensor]) -> list[Tensor]:
    """Make stored parameters float32 until a matching call to :func:`hide_fp32`, and return them."""
    stored = {param: _settled(param) for param in stored_params(params)}
    for alike, weights in _alike({p: weight for p, weight in stored.items() if not weight.shows}):
        halves = [half_of(param) for param in alike]
        masters = weights[0].format.join(halves, [weight.kept for weight in weights])
        for param, weight, master in zip(alike, weights, masters, strict=True):
            weight.show(param, master)
    for weight in stored.values():
        weight.shows += 1
    return list(stored)


@torch.inference_mode(mode=False)
@torch.no_grad()
def hide_fp32(params: Iterable[Tensor], *, steps: int = 0) -> None:
    """Store parameters in 16 bits again, after :func:`show_fp32` has made them float32.

    A parameter stays float32 until :func:`hide_fp32` has been called as often as :func:`show_fp32`.
    ``steps`` is the number of optimizer steps that were taken since :func:`show_fp32`.
    """
    ended = {param: weight for param in stored_params(params) if (weight := _settled(param)).shows}
    for weight in ended.values():
        weight.shows -= 1
        weight.steps += steps
    for alike, weights in _alike({p: weight for p, weight in ended.items() if not weight.shows}):
        masters = [local_of(param) for param in alike]
        halves = [weight.half_like(master) for weight, master in zip(weights, masters, strict=True)]
        kept = [weight.kept for weight in weights]
        weights[0].format.store(masters, halves, kept, weights[0].seed, weights[0].steps)
        for param, weight in zip(alike, weights, strict=True):
            weight.hide(param)


@contextmanager
def fp32_shown(params: Iterable[Tensor]) -> Iterator[None]:
    """Make stored parameters float32 inside a ``with`` block."""
    shown = show_fp32(params)
    try:
        yield
    finally:
        hide_fp32(shown)


def _alike(stored: dict[Tensor, StoredWeight]) -> Iterator[tuple[list[Tensor], list[StoredWeight]]]:
    """Yield groups of parameters that one op call can process, together with their StoredWeights.

    All parameters of a group have the same format and device. For stochastic rounding, all parameters of a
    group also have the same seed and step.
    """
    groups: dict[Any, list[Tensor]] = {}
    for param, weight in stored.items():
        key = weight.name, param.device, () if weight.format.kept_bytes else (weight.seed, weight.steps)
        groups.setdefault(key, []).append(param)
    return ((params, [stored[param] for param in params]) for params in groups.values())


def _exchange(param: Tensor, other: Tensor, kind: type) -> None:
    """Exchange the data of two tensors. Gradients and hooks stay with the parameter."""
    grad, param.grad = param.grad, None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, name) is not getattr(other, name):
            # Assigning the hooks also registers them with the C++ tensor, so that torch runs them.
            setattr(other, name, getattr(param, name))
    torch._C._swap_tensor_impl(param, other)
    param.__class__ = kind
    if grad is not None:  # param.grad may have been set meanwhile
        param.grad = grad.float() if param.grad is None else param.grad + grad.float()


# -- float32 state dicts ---------------


def export_fp32(model: nn.Module) -> None:
    """Make the modules of a model save and load stored parameters as float32."""
    _export_from_later_modules()
    for module in model.modules():
        if _after_state_dict not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_after_state_dict)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


@cache
def _export_from_later_modules() -> None:
    """Call export_fp32 for modules that get a stored parameter later, for example by weight tying."""

    def hook(module: nn.Module, _: str, param: nn.Parameter) -> None:
        if stored_weight(param) is not None:
            export_fp32(module)

    register_module_parameter_registration_hook(hook)


def export_as_is(model: nn.Module) -> None:
    """Undo :func:`export_fp32`."""
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for number, hook in list(hooks.items()):
                if getattr(hook, "hook", hook) in {_after_state_dict, _before_load}:
                    del hooks[number]


def _at_rest(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the stored parameters of a module that are in 16 bits now, together with their names.

    Parameters of child modules are left out.
    """
    for name, param in module._parameters.items():
        weight = None if param is None else stored_weight(param)
        if param is not None and weight is not None and not weight.shows:
            yield name, param


def _after_state_dict(module: nn.Module, state_dict: Any, prefix: str, _: Any) -> None:
    """Replace the 16-bit entries of a state dict with float32 copies, unless ``keep_vars=True`` was set."""
    for name, param in _at_rest(module):
        key = prefix + name
        if not isinstance(state_dict.get(key, param), nn.Parameter):
            weight = _settled(param)
            copy = state_dict.get(weight.exported[0])
            # For tied weights, the state dict may already contain the float32 copy under another name.
            if copy is None or copy is not weight.exported[1]():
                copy = exact_value(param)
                weight.exported = key, ref(copy)
                if not has_room(param):
                    warn_user(
                        "the state dict is made on the CPU, tensor by tensor, because a float32 copy of "
                        f"the weights would leave less than an eighth of the memory of {param.device} "
                        "free"
                    )
            state_dict[key] = copy


@torch.no_grad()
def _before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Split values into 16-bit weights and remainders before a module loads them."""
    for name, param in _at_rest(module):
        value = state_dict.get(prefix + name)
        if not isinstance(value, Tensor) or value.is_meta:
            continue
        value = value[0] if (param.dim(), value.dim()) == (0, 1) else value  # as torch loads it
        if value.shape != param.shape:
            continue
        weight, exact = _settled(param), value.detach().float()
        if is_sharded(param) and not metadata.get("assign_to_params_buffers", False):
            # StoredShard itself splits the values that are copied to it.
            continue
        if metadata.get("assign_to_params_buffers", False):
            made = state_dict[prefix + name] = nn.Parameter(exact, param.requires_grad)
            store_(made, weight.name, seed=weight.seed)
        else:
            state_dict[prefix + name], kept = weight.format.split(exact)
            weight.kept.copy_(kept)
