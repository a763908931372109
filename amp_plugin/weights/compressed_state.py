"""Keeps the moments of an optimizer in 16 or 8 bits between its steps.

- ``state[param]["exp_avg"]`` is a CompressedState, which code can read and write like a float32 tensor.
- ``state_dict()`` contains bfloat16 tensors or dicts of 8-bit codes, and float32 tensors for sharded
  parameters.
- A one-pass step reads and writes the compressed states.
- During any other step, and while a state dict is loaded, the states are float32.

:func:`ask_for` sets the format as an attribute of each parameter, so that optimizers created later can read
the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self

from amp_plugin.kernels.state_codes import decode, draws, encode, encode_exactly, in_memory_order, to_bf16
from amp_plugin.weights.decoded import DecodedTensor
from amp_plugin.weights.shard import StoredShard, local_of, with_local

_ATTRIBUTE: Final = "_amp_plugin_state"
_KEY: Final = "8bit"
_SIGNED: Final = ("exp_avg", "momentum_buffer", "grad_avg")
_SQUARES: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum", "variance")
# Maps names of states to the ``state`` argument of kernels.state_codes.draws.
_NUMBERS: Final = {name: 2 if name.startswith("max") else 1 for name in _SQUARES}
MOMENTS: Final = (*_SIGNED, *_SQUARES)
"""The names of the optimizer states that are compressed. Other states may be weights, and stay unchanged."""


class CompressedState(DecodedTensor):
    """An optimizer state that every op sees as float32, although it is stored in fewer bits.

    Values that are written to the state are rounded to nearest. Values that are written to a view of the
    state are lost.
    """

    # A bfloat16 tensor with the shape and strides of the state, or a tensor of 8-bit codes in memory order.
    kept: Tensor
    # True for first moments, which can be negative. Second moments cannot.
    signed: bool

    @staticmethod
    def __new__(cls, kept: Tensor, like: Tensor, *, signed: bool) -> Self:
        """Make a compressed state with the shape and strides of ``like``."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=torch.float32, device=kept.device
        )
        made.kept, made.signed = kept, signed
        return made

    @staticmethod
    def of(
        value: Tensor, form: str, name: str, *, step: Tensor | float | None = None, loaded: bool = False
    ) -> CompressedState:
        """Compress a float32 tensor of any memory layout.

        Args:
            value: The state.
            form: ``"bf16"`` or ``"8bit"``.
            name: The name of the state in the optimizer, such as ``"exp_avg"``.
            step: The step count, which determines the random numbers for stochastic rounding of second
                moments. If ``step`` is None, second moments are rounded to nearest.
            loaded: True if ``value`` may have been decoded from 8-bit codes. With ``loaded=True``, values
                that were decoded from 8-bit codes are encoded to exactly those codes again.
        """
        dense = torch.empty_like(value).copy_(value)
        flat, signed, drawn = in_memory_order(dense), name in _SIGNED, None
        if step is not None and not signed:
            drawn = draws(dense.numel(), step, _NUMBERS[name], dense.device)
        if form == "bf16":
            kept = torch.empty_like(dense, dtype=torch.bfloat16)
            in_memory_order(kept).copy_(to_bf16(flat, drawn))
        elif loaded:
            kept = encode_exactly(flat, signed=signed)
        else:
            kept = encode(flat, signed=signed, drawn=drawn)
        return CompressedState(kept, dense, signed=signed)

    @property
    def form(self) -> str:
        """The format in which the state is stored, ``"bf16"`` or ``"8bit"``."""
        return _KEY if self.kept.dtype is torch.uint8 else "bf16"

    def decoded(self) -> Tensor:
        """Return a float32 copy of the state."""
        if self.form == "bf16":
            return self.kept.float()
        value = torch.empty_strided(self.size(), self.stride(), dtype=torch.float32, device=self.kept.device)
        in_memory_order(value).copy_(decode(self.kept, value.numel(), signed=self.signed))
        return value

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy the compressed state to the same or another device without decoding it."""
        is_copy = func in _COPIES and kwargs.get("memory_format") in {None, torch.preserve_format}
        if not is_copy or kwargs.get("dtype") not in {None, torch.float32}:
            return NotImplemented
        options = {"device": kwargs["device"]} if "device" in kwargs else {}
        return CompressedState(func(self.kept, **options), self, signed=self.signed)

    def rewrite_(self, value: Tensor) -> None:
        """Store new float32 values, rounded to nearest."""
        name = _SIGNED[0] if self.signed else _SQUARES[0]
        self.kept.copy_(CompressedState.of(value, self.form, name).kept)


_COPIES: Final = {getattr(torch.ops.aten, op).default for op in ("detach", "clone", "_to_copy")}


# -- which parameters ------------------


def ask_for(params: Iterable[Tensor], form: str) -> None:
    """Record the format in which optimizers must store the states of parameters.

    ``"fp32"`` means uncompressed.
    """
    for param in params:
        vars(param).pop(_ATTRIBUTE, None) if form == "fp32" else setattr(param, _ATTRIBUTE, form)


def asked_for(param: Tensor) -> str | None:
    """Return the format in which optimizers must store a parameter's states. None means uncompressed."""
    return vars(param).get(_ATTRIBUTE)


# -- an optimizer's state --------------


def bytes_of(values: Any) -> int:
    """Return the number of bytes that this rank uses for all tensors in nested lists and dicts."""
    parts = [local_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum(_bytes_of(held) for part in parts for held in _held_by(part))


def _held_by(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors in which a tensor's values are stored."""
    if isinstance(tensor, StoredShard):
        return tensor.parts()
    return [tensor.kept] if isinstance(tensor, CompressedState) else [tensor]


def _bytes_of(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor.

    The bytes of a sparse tensor include its values and its indices. A lazy parameter counts as 0 bytes.
    """
    if tensor.layout is torch.strided:
        return 0 if is_lazy(tensor) else tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    in_rows = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
    places = (
        (tensor.crow_indices(), tensor.col_indices())
        if in_rows
        else (tensor.ccol_indices(), tensor.row_indices())
    )
    return tensor.values().nbytes + sum(place.nbytes for place in places)


def _decoded(value: Any) -> Any:
    """Decode a state to float32 if it is compressed. Return any other value unchanged."""
    local = local_of(value)
    return with_local(value, local.decoded()) if isinstance(local, CompressedState) else value


def compress(state: Mapping[Any, Any], *, loaded: bool = False) -> list[str]:
    """Compress the moments of parameters for which :func:`ask_for` was called.

    Args:
        state: ``optimizer.state``, which is changed in place.
        loaded: True if the states come from a checkpoint, and may have been decoded from 8-bit codes.

    Returns:
        The names of the states that stay float32. Only states whose name is that of a moment, such as
        ``exp_avg``, are compressed.
    """
    left: dict[str, None] = {}
    for param, entry in state.items():
        form = asked_for(param) if isinstance(param, Tensor) and isinstance(entry, dict) else None
        if form is None:
            decompress({param: entry})
            continue
        for name, value in list(entry.items()):
            is_float32 = getattr(value, "dtype", None) is torch.float32 and value.shape == param.shape
            if not is_float32 or getattr(local_of(value), "form", None) == form:
                continue
            if name in MOMENTS:
                step, local = None if loaded else entry.get("step"), local_of(_decoded(value))
                made = CompressedState.of(local, form, name, step=step, loaded=loaded)
                entry[name] = with_local(value, made)
            elif value.dim() > 0:
                left[name] = None
    return list(left)


def decompress(state: Mapping[Any, Any]) -> None:
    """Make the moments of all parameters float32."""
    for entry in state.values():
        if isinstance(entry, dict):
            entry.update({name: _decoded(value) for name, value in entry.items()})


# -- state dicts -----------------------


def packed(state: Mapping[Any, Any]) -> Any:
    """Convert the compressed states in an optimizer's state dict to ordinary tensors."""
    return tree_map(_packed, state)


def _packed(value: Any) -> Any:
    if not isinstance(value, CompressedState):
        # A sharded parameter's state becomes float32, because it may be resharded when it is loaded.
        return _decoded(value)
    if value.form == "bf16":
        return value.kept
    return {_KEY: value.kept, "size": [*value.size()], "stride": [*value.stride()], "signed": value.signed}


def unpacked(state: Mapping[Any, Any]) -> Any:
    """Convert 8-bit codes in an optimizer's state dict to CompressedState tensors.

    Bfloat16 states need no conversion here, because torch converts them to float32 when it loads them.
    """
    return tree_map(_unpacked, state, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, dict) and _KEY in value


def _unpacked(value: Any) -> Any:
    if not _is_packed(value):
        return value
    like = torch.empty_strided(value["size"], value["stride"], device="meta")
    return CompressedState(value[_KEY], like, signed=value["signed"])


def fp32_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with float32 states, which can be loaded without amp_plugin.

    Args:
        optimizer: An optimizer of any class, with or without compressed states. Compressed moments are
            decoded to new tensors of 4 bytes per element.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> fp32_state_dict(optimizer)["state"]
        {}
    """
    state_dict = optimizer.state_dict()
    state = state_dict["state"] = unpacked(state_dict["state"])
    decompress(state)
    for entry in state.values():
        for name in entry.keys() & MOMENTS if isinstance(entry, dict) else ():
            entry[name] = entry[name].float() if isinstance(entry[name], Tensor) else entry[name]
    return state_dict
