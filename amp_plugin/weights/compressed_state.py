"""An optimizer's moments in 16 or 8 bits between its steps: what ``optimizer.state`` holds then.

::

    state[param]["exp_avg"]    a CompressedState: a float32 tensor to whoever reads or writes it
    state_dict()               bfloat16, or {"8bit": bytes, ...}; of a sharded parameter float32
    a step in one pass         reads and writes what is kept
    any other step, a load     float32 meanwhile

The format is asked for by parameter (:func:`ask_for`), so that optimizers made later find it.
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
_NUMBERS: Final = {name: 2 if name.startswith("max") else 1 for name in _SQUARES}  # of the draws
MOMENTS: Final = (*_SIGNED, *_SQUARES)
"""Names of the states that are compressed; others may be weights, and stay as they are."""


class CompressedState(DecodedTensor):
    """A state that is float32 to every op, and is kept in fewer bits.

    What is written to it is rounded to nearest; what is written to a view of it is lost.
    """

    kept: Tensor  # bfloat16 of the same shape and strides, or codes, uint8, in the order of memory
    signed: bool  # whether the codes are of a first moment

    @staticmethod
    def __new__(cls, kept: Tensor, like: Tensor, *, signed: bool) -> Self:
        """Make one of the shape and strides of another tensor."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=torch.float32, device=kept.device
        )
        made.kept, made.signed = kept, signed
        return made

    @staticmethod
    def of(
        value: Tensor, form: str, name: str, *, step: Tensor | float | None = None, loaded: bool = False
    ) -> CompressedState:
        """Compress a float32 tensor of any layout, which an optimizer has by this name.

        ``step`` draws how second moments are rounded; None: to nearest. What was decoded once and is
        ``loaded`` gets the same codes again, to the bit.
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
        """How it is kept: ``"bf16"`` or ``"8bit"``."""
        return _KEY if self.kept.dtype is torch.uint8 else "bf16"

    def decoded(self) -> Tensor:
        """Return a float32 copy."""
        if self.form == "bf16":
            return self.kept.float()
        value = torch.empty_strided(self.size(), self.stride(), dtype=torch.float32, device=self.kept.device)
        in_memory_order(value).copy_(decode(self.kept, value.numel(), signed=self.signed))
        return value

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy what is kept, to a device too."""
        is_copy = func in _COPIES and kwargs.get("memory_format") in {None, torch.preserve_format}
        if not is_copy or kwargs.get("dtype") not in {None, torch.float32}:
            return NotImplemented
        options = {"device": kwargs["device"]} if "device" in kwargs else {}
        return CompressedState(func(self.kept, **options), self, signed=self.signed)

    def rewrite_(self, value: Tensor) -> None:
        """Keep other values, rounded to nearest."""
        name = _SIGNED[0] if self.signed else _SQUARES[0]
        self.kept.copy_(CompressedState.of(value, self.form, name).kept)


_COPIES: Final = {getattr(torch.ops.aten, op).default for op in ("detach", "clone", "_to_copy")}


# -- which parameters ---------------------------------------------------------------------------------


def ask_for(params: Iterable[Tensor], form: str) -> None:
    """Let the states of parameters be kept in a format; ``"fp32"`` as they are."""
    for param in params:
        vars(param).pop(_ATTRIBUTE, None) if form == "fp32" else setattr(param, _ATTRIBUTE, form)


def asked_for(param: Tensor) -> str | None:
    """Return the format that a parameter's states are kept in; None: as they are."""
    return vars(param).get(_ATTRIBUTE)


# -- an optimizer's state ------------------------------------------------------------------------------


def bytes_of(values: Any) -> int:
    """Return what this rank holds of all tensors in lists and dicts."""
    parts = [local_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum(_bytes_of(held) for part in parts for held in _held_by(part))


def _held_by(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that have the memory of one."""
    if isinstance(tensor, StoredShard):
        return tensor.parts()
    return [tensor.kept] if isinstance(tensor, CompressedState) else [tensor]


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one those of its values and indices, of a lazy one none."""
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
    """Return a state, or what else there is, in float32 if it is compressed."""
    local = local_of(value)
    return with_local(value, local.decoded()) if isinstance(local, CompressedState) else value


def compress(state: Mapping[Any, Any], *, loaded: bool = False) -> list[str]:
    """Compress the moments of parameters as it was asked for; return the names of float32 states left.

    ``loaded``: they were not changed by a step, and may have been compressed before.
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


# -- state dicts ---------------------------------------------------------------------------------------


def packed(state: Mapping[Any, Any]) -> Any:
    """Return the state of an optimizer's state dict in plain tensors, as it is kept."""
    return tree_map(_packed, state)


def _packed(value: Any) -> Any:
    if not isinstance(value, CompressedState):
        return _decoded(value)  # shards may be laid out otherwise when they are loaded
    if value.form == "bf16":
        return value.kept
    return {_KEY: value.kept, "size": [*value.size()], "stride": [*value.stride()], "signed": value.signed}


def unpacked(state: Mapping[Any, Any]) -> Any:
    """Return the state of a state dict as an optimizer holds it; torch itself widens bfloat16."""
    return tree_map(_unpacked, state, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, dict) and _KEY in value


def _unpacked(value: Any) -> Any:
    if not _is_packed(value):
        return value
    like = torch.empty_strided(value["size"], value["stride"], device="meta")
    return CompressedState(value[_KEY], like, signed=value["signed"])


def fp32_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict in torch's own layout: float32 states, which load anywhere.

    Args:
        optimizer: Of any class, with compressed states or without. Its moments are decoded into new
            tensors: 4 bytes per element each.

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
