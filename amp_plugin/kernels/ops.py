"""Defines the schemas and fake kernels of the ops in ``torch.ops.amp_plugin``.

Each op takes all gradients of one optimizer on one device. The gradients may have different dtypes (float16,
bfloat16, float32, float64, complex64, complex128), strides and sizes. Lazily conjugated or negated tensors
are not allowed. Sparse gradients are represented by their values, and DTensors by their local tensors.

On a GPU each op is a single kernel launch without a host sync. Only ``round_weights_`` launches a kernel for
each tensor. See docs/lab/cuda.md.

Every kernel on every device follows this contract:

- ``inv_scale`` and ``factor`` are tensors of one element, in float32 or float64, on the gradients' device.
  The host never reads them.
- ``norm`` is a new float32 0-dim tensor. All gradients are treated as one flat vector, and ``norm_type`` is
  the order of its norm. The norm is *multiplied by inv_scale*, except for order 0. Chunks of at most 65536
  elements are summed in float32. The sums of the chunks are added in float64, or by a tree reduction in a
  fixed order. Therefore the norm is accurate to 1e-6 and identical in every run. If a gradient contains inf
  or nan, the norm is inf or nan.
- ``found_inf`` is a new float32 0-dim tensor that is exactly 0.0 or 1.0. ``found_inf`` is 1.0 if any
  gradient element is inf or nan before the op, or if the op writes inf or nan to a gradient. If only the
  square of an element overflows, ``found_inf`` stays 0.0.
- ``flags`` is a new uint8 tensor ``[len(grads)]``. Bit 0 stands for inf and bit 1 for nan.
- The three ops on weights accept float32, bfloat16 and int16 tensors of any strides and sizes.
- Kernels increase the version counter of each tensor that they write. A factor of exactly 1 writes nothing.

:mod:`amp_plugin.kernels.reference` implements each op in plain torch, and defines what the op does. Devices
without faster kernels run the plain torch implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.library import Library, register_fake

from amp_plugin.kernels import reference
from amp_plugin.kernels.cuda.register import register as register_cuda_kernels
from amp_plugin.kernels.tracers import untraced

HYSTERESIS_MODES: Final = {"apex": 0, "megatron": 1, "deepspeed": 2}
"""The numbers of the values of ``hysteresis_mode``. See ``reference.update_scale_``."""

SPIKE_ACTIONS: Final = {"skip": 0, "clip": 1, "raise": 2}
"""The numbers of the values of ``action`` in ``judge_step_``. See ``reference.judge_step_``."""

SCHEMAS: Final = {
    "norm_check": (
        "(Tensor[] grads, Tensor inv_scale, float norm_type=2.0, bool is_scale=False)"
        " -> (Tensor norm, Tensor found_inf, Tensor flags)"
    ),
    "unscale_": (
        "(Tensor(a!)[] grads, Tensor inv_scale, float norm_type=2.0, bool is_scale=False)"
        " -> (Tensor norm, Tensor found_inf, Tensor flags)"
    ),
    "multiply_": (
        "(Tensor(a!)[] grads, Tensor factor, float? max_norm=None, Tensor? found_inf=None) -> Tensor"
    ),
    "update_scale_": (
        "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, Tensor found_inf, "
        "float growth_factor, float backoff_factor, int growth_interval, float min_scale, float max_scale, "
        "int hysteresis, int hysteresis_mode) -> ()"
    ),
    "clip_factor": "(Tensor norm, float max_norm, Tensor? scale=None, Tensor? found_inf=None) -> Tensor",
    "judge_step_": (
        "(Tensor[] values, Tensor norm, Tensor found_inf, Tensor(a!) statistics, "
        "Tensor(b!)[] growth_trackers, float sigma, int window, int warmup, float least_deviation, "
        "int action) -> Tensor judged"
    ),
    "step_": (
        "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor(d!)[] counters, "
        "Tensor(e!)[] remainders, str rule, float[] numbers, *, "
        "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
    ),
    "pack_weights_": "(Tensor[] masters, Tensor(a!)[] high, Tensor(b!)[] low) -> ()",
    "unpack_weights_": "(Tensor[] high, Tensor[] low, Tensor(a!)[] masters) -> ()",
    "round_weights_": "(Tensor[] masters, Tensor(a!)[] out, int seed, int step) -> ()",
    "pack_measurements_": (
        "(Tensor(a!) packed, Tensor[] norms, Tensor[] found_infs, int[] slots, int[] replicas, "
        "float norm_type) -> ()"
    ),
    "unpack_measurements": "(Tensor[] packed, float norm_type) -> (Tensor norm, Tensor found_inf)",
}

LIBRARY: Final = Library("amp_plugin", "FRAGMENT")  # type: ignore[no-untyped-call]


def _number(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((), dtype=torch.float32)


def _measured(grads: list[torch.Tensor], inv_scale: torch.Tensor, *_: float) -> tuple[torch.Tensor, ...]:
    return _number(inv_scale), _number(inv_scale), inv_scale.new_empty((len(grads),), dtype=torch.uint8)


FAKES: Final[dict[str, Callable[..., Any]]] = {  # only for ops that return tensors
    "norm_check": _measured,
    "unscale_": _measured,
    "multiply_": lambda _, factor, *__: _number(factor),
    "clip_factor": lambda norm, *_: _number(norm),
    "judge_step_": lambda _, norm, *__: norm.new_empty((6,), dtype=torch.float32),
    "unpack_measurements": lambda packed, _: (_number(packed[0]), _number(packed[0])),
}


def _define() -> None:
    for name, schema in SCHEMAS.items():
        plain = getattr(reference, name)
        fake = FAKES.get(name, lambda *_, **__: None)
        LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, plain, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        register_fake(f"amp_plugin::{name}", fake, lib=LIBRARY)
        # The C++ code calls the op ``_plain_NAME`` if no faster kernel is available.
        LIBRARY.define(f"_plain_{name}{schema}")  # type: ignore[no-untyped-call]
        LIBRARY.impl(f"_plain_{name}", untraced(plain), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


_define()
register_cuda_kernels(LIBRARY)
