"""What kind of op it is: what it writes, whether its results are its own, whether they are arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload

from amp_plugin.casting.op_names import full_name, written_arguments

# They share memory with an argument, though their schemas do not say so.
_VIEWS = frozenset({"_reshape_alias", "_unsafe_view", "alias", "detach", "set_"})

# Results of these are memory that nobody has written yet.
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
     "_resize_output_", "resize_as_", "empty_quantized"}
)  # fmt: skip

# These results are room for the backward pass, of which only the parts that it reads are written.
_ROOM = {"_ctc_loss": frozenset({1})}

# These move elements and compute none.
_MOVING = frozenset(
    {"_to_copy", "cat", "clone", "constant_pad_nd", "copy", "copy_", "diag_embed", "embedding", "flip",
     "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh", "lift_fresh_copy",
     "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "repeat",
     "roll", "scatter", "scatter_", "select_scatter", "slice_scatter", "sort", "stack", "take", "topk",
     "tril", "triu", "unfold_copy", "where"}
)  # fmt: skip

# Each element of a result comes from that place in the arguments, though torch does not tag them so.
_IN_PLACE_OF_EACH = frozenset({"_to_copy", "clone", "copy", "masked_fill", "where"})

# What they write into was there in vain.
_OVERWRITING = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_",
     "random_", "uniform_", "zero_"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTraits:
    """What is known of an op before it runs.

    Attributes:
        name: full name, ``"aten::exp.default"``.
        base: the name alone, in-place forms and lists as the plain op: ``"exp"``.
        arguments: names of its arguments, in order.
        written: names of the arguments it writes into.
        overwritten: those of them that it does not read.
        is_view: it computes nothing, its results share memory with an argument.
        is_unwritten: its results are memory with whatever was there.
        partly_unwritten: positions of results of which that is true in parts.
        moves: it moves elements and computes none.
        is_pointwise: each element of a result depends on the elements in that place.
        is_listwise: it treats the elements of its lists one by one.
        is_collective: it takes part in communication, perhaps still under way when it returns.
        is_random: it draws numbers.
    """

    name: str
    base: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]
    is_view: bool
    is_unwritten: bool
    partly_unwritten: frozenset[int]
    moves: bool
    is_pointwise: bool
    is_listwise: bool
    is_collective: bool
    is_random: bool


@cache
def traits_of(op: OpOverload) -> OpTraits:
    """Return what is known of an op, from its schema, its tags and a few lists of names."""
    name = full_name(op._name)
    packet = name.split("::")[1].split(".")[0]
    base = packet.removeprefix("_foreach_").removesuffix("_") or packet
    written = written_arguments(name)
    out = frozenset(argument.name for argument in op._schema.arguments if argument.kwarg_only)
    return OpTraits(
        name=name,
        base=base,
        arguments=tuple(argument.name for argument in op._schema.arguments),
        written=written,
        overwritten=written if packet in _OVERWRITING else written & out,
        is_view=op.is_view or packet in _VIEWS,
        is_unwritten=packet in _UNWRITTEN,
        partly_unwritten=_ROOM.get(packet, frozenset()),
        moves=packet in _MOVING,
        is_pointwise=torch.Tag.pointwise in op.tags or base in _IN_PLACE_OF_EACH,
        is_listwise=packet.startswith(("_foreach_", "_fused_")),
        is_collective=op.namespace in {"c10d", "_c10d_functional", "_c10d_functional_autograd"},
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
    )
