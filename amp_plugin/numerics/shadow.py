"""The dispatch mode that runs each op a second time in a wide dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from amp_plugin.numerics.forward_sites import runs_backward
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import Argument, arguments_of, is_low_precision, results_of
from amp_plugin.numerics.op_mode import OpMode
from amp_plugin.numerics.op_traits import OpTraits
from amp_plugin.numerics.rounding_errors import Errors
from amp_plugin.numerics.shadow_values import ShadowValues
from amp_plugin.numerics.unwatched import unwatched

Key = tuple[str, str, str]  # module, op, direction


class Shadow(OpMode):  # type: ignore[no-untyped-call]
    """Run every op beside itself in a wide dtype: on the same inputs, and on those of a run without rounding.

    Args:
        dtype: the wide dtype, fp32 or fp64.
        modules: knows which module runs; open.
    """

    def __init__(self, dtype: torch.dtype, modules: ModulePaths) -> None:
        super().__init__(modules)
        self.errors: dict[Key, Errors] = {}
        self.not_compared: dict[str, int] = {}
        self._shadows = ShadowValues(dtype)

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's shadow, of its shape."""
        return self._shadows.of(tensor)

    def run_op(self, func: OpOverload, traits: OpTraits, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run the op, and beside it in the wide dtype."""
        if traits.is_view:
            return func(*args, **kwargs)
        with unwatched():
            arguments = arguments_of(traits, args, kwargs)
            sides = self._sides(traits, args, kwargs) if self._is_computed(traits, arguments) else None
        output = func(*args, **kwargs)
        with unwatched():
            written = [argument for argument in arguments if argument.name in traits.written]
            results = [*written, *results_of(output)]
            followed = [result for result in results if self._shadows.follows(result.tensor)]
            if sides is None or not followed:
                if followed and self._is_a_loss(traits, arguments):
                    self._count(traits)
                self._own_values(followed)
            else:
                self._compare(func, traits, sides, written, output)
        return output

    @staticmethod
    def _is_computed(traits: OpTraits, arguments: list[Argument]) -> bool:
        """Whether the op can be run again: it draws no numbers, sends nothing, and is given tensors."""
        return bool(arguments) and not (traits.is_random or traits.is_collective or traits.is_unwritten)

    @staticmethod
    def _is_a_loss(traits: OpTraits, arguments: list[Argument]) -> bool:
        """Whether errors are lost where the op is not run again: its results depend on its arguments."""
        return not traits.is_unwritten and any(a.name not in traits.overwritten for a in arguments)

    def _count(self, traits: OpTraits) -> None:
        self.not_compared[traits.name] = self.not_compared.get(traits.name, 0) + 1

    def _sides(self, traits: OpTraits, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the op's arguments as wide tensors: with the program's values, and with the other run's."""
        if traits.base in {"_softmax", "_log_softmax"}:
            args = (*args[:2], False)  # half_to_float: of a half tensor only
        exact = self._shadows.exact([*args]), {name: self._shadows.exact(v) for name, v in kwargs.items()}
        arriving = (
            self._shadows.widened([*args]),
            {name: self._shadows.widened(v) for name, v in kwargs.items()},
        )
        if traits.written:  # the shadow is written afterwards, by what this copy holds
            arriving = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arriving)
            exact = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, exact)
        return exact, arriving

    def _own_values(self, results: list[Argument]) -> None:
        for result in results:
            self._shadows.reset(result.tensor)

    def _compare(
        self, func: OpOverload, traits: OpTraits, sides: Any, written: list[Argument], output: Any
    ) -> None:
        """Run the op on both wide sides, note the errors, and let the results' shadows be the other run's."""
        results = [*written, *results_of(output)]
        try:
            exact, arriving = (self._results(func, traits, *side) for side in sides)
            if [len(exact), len(arriving)] != [len(results)] * 2:
                raise RuntimeError(traits.name)  # noqa: TRY301 - counted below like any other
        except (RuntimeError, TypeError, NotImplementedError):
            self._count(traits)
            self._own_values([result for result in results if self._shadows.follows(result.tensor)])
            return
        seen: set[int] = set()
        for result, same, other in zip(results, exact, arriving, strict=True):
            if not self._shadows.follows(result.tensor) or id(result.tensor) in seen:
                continue
            seen.add(id(result.tensor))
            if result.tensor.numel() and is_low_precision(result.tensor.dtype):
                self._errors(traits).add(result.tensor, same, other)
            self._shadows.write(result.tensor, other)

    def _results(self, func: OpOverload, traits: OpTraits, args: Any, kwargs: Any) -> list[Tensor]:
        output = func(*args, **kwargs)
        written = [a.tensor for a in arguments_of(traits, args, kwargs) if a.name in traits.written]
        return [*written, *(result.tensor for result in results_of(output))]

    def _errors(self, traits: OpTraits) -> Errors:
        node = torch._C._current_autograd_node()
        site = self.sites.of(node)
        module = site.module if site else self.modules.current()
        key = (module, traits.name, "backward" if runs_backward(node) else "forward")
        return self.errors.setdefault(key, Errors())
