"""The forward of a prepared model: under autocast, its outputs in fp32."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import AutocastKwargs, convert_to_fp32, recursively_apply
from torch import nn

from amp_plugin.casting.region import autocast


@dataclass(frozen=True, kw_only=True)
class RegionOptions:
    """How a prepared model computes.

    Attributes:
        device_type: device of the model.
        dtype: float16 or bfloat16.
        enabled: False computes as without autocast.
        cache_enabled: keep the cast of a weight for its next use in one forward.
        fp32_outputs: convert float16 and bfloat16 outputs to fp32.
        all_in_16_bits: compute without autocast, with inputs in ``dtype``: all weights are stored in it.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = None
    fp32_outputs: bool = True
    all_in_16_bits: bool = False

    def with_kwargs(self, handler: AutocastKwargs | None) -> RegionOptions:
        """Return the options of one block, which Accelerate's AutocastKwargs may change."""
        if handler is None:
            return self
        return replace(self, enabled=handler.enabled, cache_enabled=handler.cache_enabled)

    def region(self) -> torch.autocast:
        """Return a new autocast region."""
        return autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


class MixedForward:
    """Stands in for ``module.forward``; can be pickled, copied and compiled with its module.

    The attributes ``__wrapped__`` here and ``_original_forward`` on the module are what
    ``accelerate.utils.extract_model_from_parallel`` looks for to take it off again.
    """

    def __init__(
        self, module: nn.Module, options: RegionOptions, eval_options: RegionOptions | None = None
    ) -> None:
        self.module = module
        self.options = options
        self.eval_options = options if eval_options is None else eval_options
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    @staticmethod
    def put_on(module: nn.Module, options: RegionOptions, eval_options: RegionOptions | None = None) -> None:
        """Give ``module`` a mixed forward; nothing happens if it has one.

        Args:
            module: changed in place.
            options: how it computes in training.
            eval_options: how it computes in ``eval()`` mode; None: the same.
        """
        if isinstance(module.__dict__.get("forward"), MixedForward):
            return
        forward = MixedForward(module, options, eval_options)
        module._original_forward = forward.__wrapped__  # type: ignore[assignment]
        module.forward = forward

    @staticmethod
    def take_off(module: nn.Module) -> None:
        """Give ``module`` its own forward back; nothing happens if it has it."""
        forward = module.__dict__.get("forward")
        if not isinstance(forward, MixedForward):
            return
        module.__dict__.pop("_original_forward", None)
        if forward.own is None:
            del module.__dict__["forward"]
        else:
            module.forward = forward.own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward as a function of module and inputs."""
        if self.own is None:
            return type(self.module).forward
        function = getattr(self.own, "__func__", None)
        return function if function is not None else _ignore_module(self.own)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward, without ``self``."""
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        if self.own is not None:
            return self.own
        bound: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in the region."""
        options = self.options if self.module.training else self.eval_options
        if options.all_in_16_bits:
            args, kwargs = recursively_apply(
                partial(torch.Tensor.to, dtype=options.dtype), (args, kwargs), test_type=_is_floating_point
            )
        with autocast(options.device_type, options.dtype, options.enabled, options.cache_enabled):
            if self.own is not None:
                output = self.own(*args, **kwargs)
            else:  # not bound first: no Dynamo before torch 2.13 can trace that
                output = type(self.module).forward(self.module, *args, **kwargs)
        return convert_to_fp32(output) if options.fp32_outputs else output


def _is_floating_point(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _ignore_module:  # noqa: N801 -- a function that can be pickled and compared
    """A forward that was set on the instance, called as if it were the class's."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ignore_module) and other.forward == self.forward

    def __hash__(self) -> int:
        return hash(self.forward)
