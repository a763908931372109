"""A tensor that is float32 to every op and is kept in other bits: compressed states and stored shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


class DecodedTensor(Tensor):
    """A tensor that ops read and write in float32, while its memory holds something shorter.

    ::

        an op reads it      it gets a float32 copy
        an op writes it     the float32 copy is written, and rewrite_() stores it
        an op that only moves or looks at what is kept    as_kept() does it without float32
    """

    def decoded(self) -> Tensor:
        """Return a float32 copy."""
        raise NotImplementedError

    def rewrite_(self, value: Tensor) -> None:
        """Keep other values.

        Args:
            value: float32, of the same shape and device.
        """
        raise NotImplementedError

    def as_kept(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an op that needs no float32; NotImplemented if it does.

        Args:
            func: An overload of ``torch.ops.aten`` whose first argument is this tensor.
            args: All of its positional arguments.
            kwargs: The others.
        """
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a float32 tensor."""
        return memo.setdefault(id(self), self.decoded())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a float32 tensor, which loads without this package."""
        return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with float32 copies, and store those that were written."""
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
