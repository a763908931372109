"""Shards of stored parameters. FSDP2 gathers the 16-bit weights, and optimizers see float32 parameters.

- The local tensor of the parameter is a StoredShard, which holds the 16-bit weight and its remainder. The
  remainder holds those bits of the float32 value that do not fit into the 16-bit weight.
- An all-gather sends the 16-bit weight, through torch's hooks ``fsdp_pre_all_gather`` and
  ``fsdp_post_all_gather``.
- The gathered weight is an ordinary 16-bit tensor.
- The gradient is reduced in the dtype that the mixed-precision policy sets, and is float32 when it reaches
  the parameter.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from amp_plugin.weights.decoded import DecodedTensor
from amp_plugin.weights.formats import FORMATS, SplitBf16


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor. Any other tensor is returned itself."""
    return getattr(tensor, "_local_tensor", tensor)


def with_local(value: Any, local: Tensor) -> Tensor:
    """Return ``local``. If ``value`` is a DTensor, wrap ``local`` as the local shard of a similar DTensor."""
    is_whole = local_of(value) is value
    return local if is_whole else type(value)(local, value._spec, requires_grad=False)


def set_local_(param: Any, local: Tensor) -> None:
    """Replace the local shard of a DTensor in place, so that the DTensor stays the same object."""
    param._local_tensor = local


class StoredShard(DecodedTensor):
    """The local shard of a stored parameter on one rank. Every op sees the shard as a float32 tensor.

    Reads return the exact float32 values, and writes store them exactly. A view is also a StoredShard and
    shares the shard's memory. Therefore torch can pad, split and move a shard without losing its remainder.
    """

    weight_16: Tensor  # the 16-bit weight that the model uses
    kept: Tensor  # the remainder, in the shape of the weight, or an empty tensor for stochastic rounding
    form: str  # a key of FORMATS
    seed: int  # the seed of stochastic rounding

    @staticmethod
    def __new__(cls, half: Tensor, kept: Tensor, form: str, seed: int = 0) -> Self:
        """Make a shard from a 16-bit weight and its remainder, without copying them."""
        options: dict[str, Any] = {"strides": half.stride(), "dtype": torch.float32, "device": half.device}
        # FSDP2 reads the shard's data pointer, which raises an error unless the storage size is 0.
        made: Self = Tensor._make_wrapper_subclass(cls, half.size(), storage_size=0, **options)
        made.weight_16, made.kept, made.form, made.seed = half, kept, form, seed
        return made

    @staticmethod
    def of(value: Tensor, form: str, seed: int = 0) -> StoredShard:
        """Store a float32 tensor in the format ``FORMATS[form]``."""
        return StoredShard(*FORMATS[form].split(value.detach()), form, seed)

    @property
    def format(self) -> SplitBf16:
        """The format in which the shard is stored."""
        return FORMATS[self.form]

    def decoded(self) -> Tensor:
        """Return a float32 copy of the shard."""
        (value,) = self.format.join([self.weight_16], [self.kept])
        return value.clone() if value.data_ptr() == self.kept.data_ptr() else value

    def rewrite_(self, value: Tensor) -> None:
        """Store new float32 values."""
        self._copy_from(StoredShard.of(value, self.form))

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy, move, pad or split the weight and the remainder in the same way.

        A cast to the dtype of the 16-bit weight returns a copy of that weight.
        """
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
        """Return the shard's 16-bit weight, followed by the remainder if there is one."""
        return [self.weight_16, self.kept] if self.format.kept_bytes else [self.weight_16]

    def _copy_from(self, other: StoredShard) -> None:
        for own, new in zip(self.parts(), other.parts(), strict=True):
            own.copy_(new)

    def _of_parts(self, half: Tensor, kept: Tensor | None = None) -> StoredShard:
        return StoredShard(half, half.new_empty(0) if kept is None else kept, self.form, self.seed)

    # -- hooks for FSDP2's all-gather ------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return the tensor that this rank sends, which is the 16-bit weight itself if the dtypes match.

        Args:
            mesh: The device mesh of the ranks that hold shards of the weight.
            outer_size: The size of the whole weight.
            outer_stride: The stride of the whole weight. Not used.
            module: The module that holds the weight. Not used.
            mp_policy: The mixed-precision policy, whose ``param_dtype`` is the dtype of the gathered weight.

        Returns:
            Two values. The first value is a tuple with one tensor, which this rank sends. The second value is
            None, because there is no metadata. The tensor is padded to the size of the first rank's shard.
        """
        del outer_stride, module
        dtype = mp_policy.param_dtype or torch.float32
        sent = self.weight_16 if dtype is self.weight_16.dtype else self.decoded().to(dtype)
        if self.size()[1:] != outer_size[1:]:
            # The weight is not sharded along its first dimension.
            # Along other dimensions, torch requires shards of equal size, so no padding is needed.
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
        """Return the gathered weight, which shares the memory of the all-gather's output.

        Args:
            all_gather_outputs: A single tensor with the shards of all ranks, one after another.
            metadata: Always None.
            param_dtype: The dtype of the weight. Not used.
            out: None in the first all-gather. In each later all-gather, ``out`` is the weight that the first
                all-gather returned.

        Returns:
            A pair of the weight and an empty tuple. If ``out`` is given, None is returned instead of a pair.
        """
        del metadata, param_dtype
        return None if out is not None else (all_gather_outputs[0], ())


_NAMES: Final = ("alias", "as_strided", "clone", "detach", "new_zeros", "view", "_pin_memory", "_to_copy")
_ON_BOTH: Final = {
    *(getattr(torch.ops.aten, name).default for name in _NAMES),
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
}
