"""The dispatch mode that every watcher of ops is built on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from amp_plugin.numerics.forward_sites import ForwardSites
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import PLAIN
from amp_plugin.numerics.op_traits import OpTraits, traits_of


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give each op of this thread, and of the backward passes it starts, to :meth:`run_op`.

    Attributes:
        modules: knows which module runs; open.
        sites: where the ops of the forward passes ran.
    """

    def __init__(self, modules: ModulePaths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.sites = ForwardSites()

    def __enter__(self) -> Self:
        self.sites.open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note where an op runs, and run it; fake tensors have no numbers to look at."""
        kwargs = kwargs or {}
        if any(kind not in PLAIN for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)
            return NotImplemented  # the subclass's own ops come here one by one
        traits = traits_of(func)
        if torch.is_grad_enabled():
            self.sites.note(traits.name, self.modules.current())
        return self.run_op(func, traits, args, kwargs)

    def run_op(self, func: OpOverload, traits: OpTraits, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an op with its arguments, look at it, and return what it returns."""
        raise NotImplementedError
