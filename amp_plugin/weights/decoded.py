"""A tensor class that every op sees as float32, although its memory holds fewer bits per element.

The subclasses are CompressedState, for optimizer states, and StoredShard, for shards of weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


class DecodedTensor(Tensor):
    """A tensor that ops read and write as float32, while its memory holds a compressed format.

    - An op that reads the tensor gets a float32 copy.
    - An in-place op on the tensor changes a float32 copy instead, which ``rewrite_()`` then stores.
    - An op that only copies, moves or views the tensor runs on the stored format, through ``as_kept()``.
    """

    def decoded(self) -> Tensor:
        """Return a decoded float32 copy."""
        raise NotImplementedError

    def rewrite_(self, value: Tensor) -> None:
        """Store new values.

        Args:
            value: A float32 tensor of the same shape and on the same device.
        """
        raise NotImplementedError

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op directly on the stored format. Return NotImplemented if the op needs float32 values.

        Args:
            func: An overload of ``torch.ops.aten`` whose first argument is this tensor.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 tensor."""
        return memo.setdefault(id(self), self.decoded())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as an ordinary float32 tensor, which can be loaded without amp_plugin."""
        return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on float32 copies, and store each copy that the op has written to."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], DecodedTensor):
            result = args[0].as_kept(func, args, kwargs)
            if result is not NotImplemented:
                return result
        copies: dict[int, Tensor] = {}

        def copy_of(value: Any) -> Any:
            if id(value) not in copies:
                copies[id(value)] = value.decoded()
            return copies[id(value)]

        result = func(
            *tree_map_only(DecodedTensor, copy_of, args), **tree_map_only(DecodedTensor, copy_of, kwargs)
        )
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for written in tree_leaves({**given, **kwargs}.get(argument.name)):
                    if isinstance(written, DecodedTensor):
                        written.rewrite_(copies[id(written)])
        same = {id(copies[id(v)]): v for v in tree_leaves((args, kwargs)) if id(v) in copies}
        return tree_map(lambda value: same.get(id(value), value), result)
