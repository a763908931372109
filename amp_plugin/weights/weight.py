"""A parameter that is stored in 16 bits: its one record, and float32 for as long as somebody asks for it.

::

    at rest:  param is 16 bits, record.kept what they lack of float32
    shown:    param itself is float32: the same Python object, with the tensor exchanged underneath
    count:    shown at the first of nested requests, stored at the end of the last

So optimizers, their groups and their state know one parameter, which is float32 whenever they look, while
autograd and DDP hold the 16-bit tensor. The record is an attribute of the parameter; copies and pickles of a
parameter are float32 parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast
from weakref import ref

import torch
from torch import Tensor, nn

from amp_plugin.weights.formats import FORMATS, Format

_ATTRIBUTE: Final = "_amp_plugin_stored"
_GRAD: Final[Any] = Tensor.grad  # descriptors
_DATA: Final[Any] = Tensor.data


class StoredWeight:
    """The record of a stored parameter.

    Attributes:
        name: How it is stored, as users write it.
        seed: For stochastic rounding.
        kept: What its 16 bits lack; on its device from the next use on.
        steps: Optimizer steps that it has taken.
        shows: How many want it in float32 now.
        hidden: Holds the 16-bit tensor meanwhile.
        exported: The state dict that a float32 copy was last put into, and that copy.
    """

    __slots__ = ("exported", "hidden", "kept", "name", "seed", "shows", "steps")

    def __init__(self, name: str, kept: Tensor, seed: int, steps: int = 0) -> None:
        self.name, self.kept, self.seed, self.steps = name, kept, seed, steps
        self.shows = 0
        self.hidden: nn.Parameter | None = None
        self.exported: tuple[ref[Any], ref[Tensor]] | None = None

    @property
    def format(self) -> Format:
        """How it is stored."""
        return FORMATS[self.name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing in a pickle of a parameter that is shown, which is a float32 one there."""
        return bool, ()


class StoredParameter(nn.Parameter):
    """The class of a stored parameter at rest."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient, float32; one that is assigned in the weight's 16 bits becomes float32."""
        return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, given: Tensor | None) -> None:
        _GRAD.__set__(self, given.float() if given is not None and given.dtype is self.dtype else given)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def data(self) -> Tensor:
        """The 16 bits; assigned float32 is stored, all bits, unless it is these 16 bits widened."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, given: Tensor) -> None:
        if given.dtype is torch.float32 and given.shape == self.shape and given.device == self.device:
            present = _DATA.__get__(self).float()
            if not torch.equal(given, present) or torch.equal(present, exact_value(self)):
                weight = _record(self)
                given, weight.kept = weight.format.split(given)
        _DATA.__set__(self, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a float32 parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(exact_value(self), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle a float32 parameter, which loads without this package."""
        arguments: tuple[Any, ...] = (exact_value(self), self.requires_grad, OrderedDict())
        attributes = {name: value for name, value in vars(self).items() if name != _ATTRIBUTE}
        if attributes:
            return torch._utils._rebuild_parameter_with_state, (*arguments, attributes)
        return torch._utils._rebuild_parameter, arguments


def stored_weight(param: Tensor) -> StoredWeight | None:
    """Return the record of a parameter; None if it is stored as it is."""
    return param.__dict__.get(_ATTRIBUTE) or None


def _record(param: Tensor) -> StoredWeight:
    return param.__dict__[_ATTRIBUTE]  # type: ignore[no-any-return]


def stored_params(params: Iterable[Tensor]) -> list[Tensor]:
    """Return those that are stored in 16 bits, each once."""
    return [param for param in dict.fromkeys(params) if param.__dict__.get(_ATTRIBUTE)]


def is_shown(param: Tensor) -> bool:
    """Whether a stored parameter is float32 at present."""
    weight = stored_weight(param)
    return weight is not None and weight.shows > 0


# -- storing and giving back -------------------------------------------------------------------------


@torch.no_grad()
def store_(param: nn.Parameter, name: str, *, seed: int = 0) -> None:
    """Store a parameter as ``FORMATS[name]`` says, in place; exactly if it is stored in another way."""
    known = stored_weight(param)
    if known is not None:
        if known.name == name:
            return
        restore_(param)
    grad, param.grad = param.grad, None
    value, kept = FORMATS[name].split(param.detach().float())
    if param.dtype is value.dtype:
        param.copy_(value)
    else:
        param.data = value
    param.grad_dtype = torch.float32
    param.__class__ = StoredParameter
    setattr(param, _ATTRIBUTE, StoredWeight(name, kept, seed))
    if grad is not None:
        param.grad = grad.float()


@torch.no_grad()
def restore_(param: Tensor) -> None:
    """Make a stored parameter an ordinary float32 one, in place and exactly."""
    if is_shown(param):
        msg = "restore_weights within in_fp32, or within an optimizer step: call it after the block"
        raise RuntimeError(msg)
    value, grad = exact_value(param), param.grad
    param.grad = None
    delattr(param, _ATTRIBUTE)
    param.__class__ = nn.Parameter
    param.data = value
    param.grad = grad


def assigned(param: Tensor, value: Tensor) -> nn.Parameter:
    """Return a new parameter of a float32 value, stored as ``param`` is."""
    weight = stored_weight(param)
    made = nn.Parameter(value, param.requires_grad)
    if weight is not None:
        store_(made, weight.name, seed=weight.seed)
    return made


# -- reading -----------------------------------------------------------------------------------------


@torch.no_grad()
def exact_value(param: Tensor) -> Tensor:
    """Return a stored parameter in float32, a new tensor; on the host where its GPU is nearly full."""
    weight = _settled(param)
    if weight.shows:
        return param.detach().clone()
    device = param.device if has_room(param) else torch.device("cpu")
    (value,) = weight.format.join([param.detach().to(device)], [weight.kept.to(device)])
    return value.clone() if value.data_ptr() == weight.kept.data_ptr() else value


def has_room(param: Tensor) -> bool:
    """Whether a GPU has room for a parameter in float32, and an eighth of its memory for others."""
    if param.device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(param.device)
    cached = torch.cuda.memory_reserved(param.device) - torch.cuda.memory_allocated(param.device)
    return free + cached - 4 * param.numel() > total // 8


@torch.no_grad()
def remainder_of(param: Tensor) -> Tensor | None:
    """Return what a stored parameter lacks of float32, for ops that step a parameter with it.

    Returns:
        The low half of a pair (int16), or the master of a parameter in fp16 (float32), of its shape; None if
        the parameter, as it is now, is all there is.

    Raises:
        ValueError: It is stored in a way that no op steps.
    """
    weight = stored_weight(param)
    if weight is None or weight.shows:
        return None
    if not weight.format.kept_bytes:
        msg = f"a weight is stored with weights={weight.name!r}"
        raise ValueError(msg)
    kept = _settled(param).kept
    if kept.dtype is torch.float32:
        weight.format.join([param], [kept])  # with what somebody else has written
    return kept


def _settled(param: Tensor) -> StoredWeight:
    """Return a record that fits its parameter, which may have moved or been given other data."""
    weight = _record(param)
    wanted = torch.float32 if weight.shows else weight.format.dtype
    if param.dtype is not wanted:
        msg = (
            f"a weight of shape {tuple(param.shape)} that is stored with weights={weight.name!r} is in "
            f"{param.dtype} now: something has converted the model (model.float(), model.half(), "
            "model.to(dtype)), and rounded it. Call amp_plugin.restore_weights(model) before that"
        )
        raise RuntimeError(msg)
    if weight.kept.device != param.device:
        weight.kept = weight.kept.to(param.device)
    if weight.kept.shape != param.shape and weight.format.kept_bytes:
        _, weight.kept = weight.format.split(param.detach().float())
    return weight


# -- showing and hiding ------------------------------------------------------------------------------


@torch.inference_mode(mode=False)
@torch.no_grad()
def show_fp32(params: Iterable[Tensor]) -> list[Tensor]:
    """Make stored parameters float32 until :func:`hide_fp32` is called as often; return them, for it."""
    stored = [(param, _settled(param)) for param in stored_params(params)]
    for alike in _alike(param for param, weight in stored if not weight.shows):
        weights = list(map(_record, alike))
        masters = weights[0].format.join(alike, [weight.kept for weight in weights])
        for param, weight, master in zip(alike, weights, masters, strict=True):
            weight.hidden = nn.Parameter(master, param.requires_grad)
            _exchange(param, weight.hidden, nn.Parameter)
    for _, weight in stored:
        weight.shows += 1
    return [param for param, _ in stored]


@torch.inference_mode(mode=False)
@torch.no_grad()
def hide_fp32(params: Iterable[Tensor], *, steps: int = 0) -> None:
    """Store what :func:`show_fp32` has returned, ``steps`` later, unless somebody still wants it."""
    ended = [(param, _settled(param)) for param in params if stored_weight(param) is not None]
    for _, weight in ended:
        weight.shows -= 1
        weight.steps += steps
    for alike in _alike(param for param, weight in ended if not weight.shows):
        weights = list(map(_record, alike))
        halves = [_moved(weight.hidden, param) for param, weight in zip(alike, weights, strict=True)]
        kept = [weight.kept for weight in weights]
        weights[0].format.store(alike, halves, kept, weights[0].seed, weights[0].steps)
        for param, weight, half in zip(alike, weights, halves, strict=True):
            half.requires_grad_(param.requires_grad)
            _exchange(param, half, StoredParameter)
            weight.hidden = None


@contextmanager
def fp32_shown(params: Iterable[Tensor]) -> Iterator[None]:
    """Make stored parameters float32 within a block."""
    shown = show_fp32(params)
    try:
        yield
    finally:
        hide_fp32(shown)


def _alike(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group parameters that one call of an op takes."""
    groups: dict[Any, list[Tensor]] = {}
    for param in params:
        weight = _record(param)
        step = 0 if weight.format.kept_bytes else weight.steps
        groups.setdefault((weight.name, weight.seed, step, param.device), []).append(param)
    return iter(groups.values())


def _moved(half: nn.Parameter | None, param: Tensor) -> nn.Parameter:
    """Return the 16-bit tensor, where the parameter is and of its shape."""
    half = cast("nn.Parameter", half)
    if half.device != param.device or half.shape != param.shape:
        half.data = torch.empty_like(param, dtype=half.dtype)
    return half


def _exchange(param: Tensor, other: Tensor, kind: type) -> None:
    """Exchange the tensors that two Python objects stand for; the gradient stays with the parameter."""
    grad, param.grad = param.grad, None
    torch._C._swap_tensor_impl(param, other)
    param.__class__ = kind
    made_meanwhile = param.grad
    if grad is not None:
        if grad.dtype is not torch.float32:
            grad = grad.float()
        param.grad = grad if made_meanwhile is None else made_meanwhile + grad
