"""Runs the forward pass of prepared models under autocast with fp32 outputs, and passes dtypes to FSDP."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, convert_to_fp32, recursively_apply
from torch import nn
from torch.distributed import fsdp

from amp_plugin.casting.threads import RegionState
from amp_plugin.patches import replaced
from amp_plugin.patterns import found_patterns
from amp_plugin.sharding.fully_shard import fsdp1_policy, policy_of, shard_unit
from amp_plugin.sharding.plan import DtypePlan


@dataclass(kw_only=True, eq=False)
class MixedForward:
    """Replaces ``module.forward``, including in pickles, copies and compiled versions of the module."""

    module: nn.Module
    training: RegionState
    evaluation: RegionState
    fp32_outputs: bool = True
    # The dtype to which inputs are cast if all weights are stored in 16 bits, otherwise None.
    inputs: torch.dtype | None = None
    own: Callable[..., Any] | None = field(init=False)  # a forward that was set on the instance

    def __post_init__(self) -> None:
        self.own = vars(self.module).get("forward")

    def put_on(self) -> None:
        """Replace the module's forward with this object, unless a MixedForward has already replaced it."""
        if not isinstance(self.own, MixedForward):
            # Accelerate's extract_model_from_parallel unwraps __wrapped__ until it reaches _original_forward.
            self.module._original_forward = self.__wrapped__  # type: ignore[assignment]
            self.module.forward = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, as an unbound function that Accelerate can bind to a module."""
        if self.own is None:
            return type(self.module).forward
        return getattr(self.own, "__func__", None) or partial(_without_module, self.own)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward, without ``self``."""
        return inspect.signature(self.own or type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward under autocast."""
        state = self.training if self.module.training else self.evaluation
        if self.inputs is not None:
            args, kwargs = recursively_apply(self._cast, (args, kwargs))
        with state.region():
            if self.own is not None:
                output = self.own(*args, **kwargs)
            # The forward is called unbound, because Dynamo before torch 2.13 cannot trace a bound method.
            else:
                output = type(self.module).forward(self.module, *args, **kwargs)
        return convert_to_fp32(output) if self.fp32_outputs else output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.inputs) if tensor.is_floating_point() else tensor


def _without_module(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def give_policy(plugin: FullyShardedDataParallelPlugin, plan: DtypePlan, *, fp32_outputs: bool) -> None:
    """Replace Accelerate's default FSDP policy, which reduces gradients in 16 bits. A user's policy stays."""
    dtype = plan.compute_dtype
    if plugin.mixed_precision_policy == fsdp.MixedPrecision(dtype, dtype, dtype):  # FSDP1's
        plugin.mixed_precision_policy = fsdp1_policy(plan)
    elif plugin.mixed_precision_policy == fsdp.MixedPrecisionPolicy(dtype, dtype, dtype):
        plugin.mixed_precision_policy = policy_of(plan, output_dtype=None if fp32_outputs else dtype)


@contextmanager
def fp32_units_apart(models: Sequence[nn.Module], plan: DtypePlan) -> Iterator[None]:
    """Make ``fully_shard`` wrap fp32 modules separately, because it all-gathers each unit in one dtype."""
    own = fsdp.fully_shard
    in_fp32: set[nn.Module] = set()
    for model in models:
        found = replace(plan, fp32_modules=found_patterns(model, plan.fp32_modules))
        in_fp32 |= found.in_fp32(model)

    @functools.wraps(own)
    def by_plan(module: Any, **options: Any) -> Any:
        return shard_unit(own, module, plan, in_fp32, **options)

    with replaced(fsdp, "fully_shard", by_plan):
        yield
