"""A shard of a stored parameter: what FSDP2 gathers is its 16 bits, what optimizers see is float32.

::

    param._local_tensor    a StoredShard: 16 bits, and what they lack of float32
    all-gather             the 16 bits as they are, by the extension that torch offers to tensors in shards
    the gathered weight    an ordinary tensor in 16 bits
    its gradient           reduced as the policy says, float32 when it reaches the parameter
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from amp_plugin.weights.decoded import DecodedTensor
from amp_plugin.weights.formats import FORMATS, SplitBf16


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor its shard, of any other all of it."""
    return getattr(tensor, "_local_tensor", tensor)


def with_local(value: Any, local: Tensor) -> Tensor:
    """Return a tensor with other contents: of a DTensor one with this rank's part."""
    is_whole = local_of(value) is value
    return local if is_whole else type(value)(local, value._spec, requires_grad=False)


def set_local_(param: Any, local: Tensor) -> None:
    """Put another tensor in the place of this rank's part of a DTensor, which stays the object it is."""
    param._local_tensor = local


class StoredShard(DecodedTensor):
    """The part of a stored parameter that one rank holds; float32 to every op.

    Views share its memory, so that torch can pad it, cut it and move it. Reads give all bits of float32, and
    all bits that are written are stored.
    """

    weight_16: Tensor  # what the model computes with
    kept: Tensor  # what it lacks of float32, of the same shape; empty for stochastic rounding
    form: str  # a key of FORMATS
    seed: int  # of stochastic rounding

    @staticmethod
    def __new__(cls, half: Tensor, kept: Tensor, form: str, seed: int = 0) -> Self:
        """Make one of both parts, without a copy."""
        options: dict[str, Any] = {"strides": half.stride(), "dtype": torch.float32, "device": half.device}
        # FSDP2 asks where its memory is, which torch refuses to say of a storage that claims to have some.
        made: Self = Tensor._make_wrapper_subclass(cls, half.size(), storage_size=0, **options)
        made.weight_16, made.kept, made.form, made.seed = half, kept, form, seed
        return made

    @staticmethod
    def of(value: Tensor, form: str, seed: int = 0) -> StoredShard:
        """Store a float32 tensor as ``FORMATS[form]`` says."""
        return StoredShard(*FORMATS[form].split(value.detach()), form, seed)

    @property
    def format(self) -> SplitBf16:
        """How it is stored."""
        return FORMATS[self.form]

    def decoded(self) -> Tensor:
        """Return a float32 copy."""
        (value,) = self.format.join([self.weight_16], [self.kept])
        return value.clone() if value.data_ptr() == self.kept.data_ptr() else value

    def rewrite_(self, value: Tensor) -> None:
        """Store other values."""
        self._copy_from(StoredShard.of(value, self.form))

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy, move, pad and cut both parts alike; cast to the 16 bits by a copy of them."""
        dtype = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype is self.weight_16.dtype:
            return func(self.weight_16, *args[1:], **kwargs)
        if func is torch.ops.aten.copy_.default and getattr(args[1], "form", None) == self.form:
            self._copy_from(args[1])
            return self
        if func is torch.ops.aten.is_pinned.default:
            return self.weight_16.is_pinned()
        if func not in _ON_BOTH or dtype not in {None, torch.float32}:
            return NotImplemented
        options = {name: value for name, value in kwargs.items() if name != "dtype"}
        made = [func(part, *args[1:], **options) for part in self.parts()]
        if not isinstance(made[0], Tensor):
            return type(made[0])(map(self._of_parts, *made))
        return self._of_parts(*made)

    def parts(self) -> list[Tensor]:
        """Return the tensors that hold it: the 16 bits, and what they lack if anything is kept."""
        return [self.weight_16, self.kept] if self.format.kept_bytes else [self.weight_16]

    def _copy_from(self, other: StoredShard) -> None:
        for own, new in zip(self.parts(), other.parts(), strict=True):
            own.copy_(new)

    def _of_parts(self, half: Tensor, kept: Tensor | None = None) -> StoredShard:
        return StoredShard(half, half.new_empty(0) if kept is None else kept, self.form, self.seed)

    # -- what FSDP2 asks of a shard, as torchao's float8 weights answer it ------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return what this rank sends: its 16 bits, or float32 where the policy gathers that.

        Args:
            mesh: Of the ranks that hold the shards.
            outer_size: Of the whole weight.
            outer_stride: Of the whole weight; not used.
            module: That holds the weight; not used.
            mp_policy: Its ``param_dtype`` is the dtype that the weight is gathered in.

        Returns:
            One tensor, padded to the size of the first rank's shard, and nothing to remember.
        """
        del outer_stride, module
        dtype = mp_policy.param_dtype or torch.float32
        sent = self.weight_16 if dtype is self.weight_16.dtype else self.decoded().to(dtype)
        if self.size()[1:] != outer_size[1:]:  # cut along another dimension, where shards are even
            return (sent,), None
        rows = -(-outer_size[0] // mesh.size())
        if sent.size(0) == rows:
            return (sent,), None
        padded = sent.new_zeros((rows, *sent.size()[1:]))
        padded[: sent.size(0)].copy_(sent)
        return (padded,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: None, param_dtype: Any, *, out: Any = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Return the gathered weight, which is the memory that was gathered into.

        Args:
            all_gather_outputs: One tensor, the shards of all ranks one after the other.
            metadata: None.
            param_dtype: Of the weight; not used.
            out: The weight of an earlier gathering, whose memory this is; None the first time.

        Returns:
            The weight and no other tensors; None if ``out`` is given.
        """
        del metadata, param_dtype
        return None if out is not None else (all_gather_outputs[0], ())


_NAMES: Final = ("alias", "as_strided", "clone", "detach", "new_zeros", "view", "_pin_memory", "_to_copy")
_ON_BOTH: Final = {
    *(getattr(torch.ops.aten, name).default for name in _NAMES),
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
}
