"""The forward of a prepared model, on the instance as Accelerate's is: under autocast, outputs in fp32."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, recursively_apply
from torch import nn

from amp_plugin.casting.threads import RegionState


@dataclass(kw_only=True, eq=False)
class MixedForward:
    """Stands in for ``module.forward``; pickled, copied and compiled with its module.

    ``training`` and ``evaluation`` are the regions of the two modes; ``inputs`` is what floating-point inputs
    become where all weights are stored in it; ``own`` is a forward that was set on the instance.
    """

    module: nn.Module
    training: RegionState
    evaluation: RegionState
    fp32_outputs: bool = True
    inputs: torch.dtype | None = None
    own: Callable[..., Any] | None = field(init=False)

    def __post_init__(self) -> None:
        self.own = vars(self.module).get("forward")

    def put_on(self) -> None:
        """Give the module this forward; nothing happens if it has such a one."""
        if not isinstance(self.own, MixedForward):
            # extract_model_from_parallel: "if original_forward is not None:" it follows __wrapped__ to it
            self.module._original_forward = self.__wrapped__  # type: ignore[assignment]
            self.module.forward = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward as a function of module and inputs, for Accelerate to bind."""
        if self.own is None:
            return type(self.module).forward
        return getattr(self.own, "__func__", None) or partial(_without_module, self.own)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward, without ``self``."""
        own = self.own or type(self.module).forward.__get__(self.module)
        return inspect.signature(own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in the region."""
        state = self.training if self.module.training else self.evaluation
        if self.inputs is not None:
            args, kwargs = recursively_apply(self._cast, (args, kwargs))
        with state.region():
            if self.own is not None:
                output = self.own(*args, **kwargs)
            else:  # not bound first: no Dynamo before torch 2.13 can trace that
                output = type(self.module).forward(self.module, *args, **kwargs)
        return convert_to_fp32(output) if self.fp32_outputs else output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.inputs) if tensor.is_floating_point() else tensor


def _without_module(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
