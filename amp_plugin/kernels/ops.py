"""The ops of ``torch.ops.amp_plugin``: schemas, fake kernels and their cost.

Each op takes all gradients of one optimizer on one device. They may have different dtypes (float16, bfloat16,
float32, float64, complex64, complex128), strides and sizes. Lazily conjugated or negated tensors are not
allowed. For a sparse gradient its values are passed, for a DTensor its local tensor.

On a GPU each op is one launch without a host sync (``round_weights_``: one launch per tensor). See
docs/lab/cuda.md.

Contract of every kernel, whatever the device:

- ``inv_scale`` and ``factor`` have one element, float32 or float64, on the gradients' device. They are read
  there, never on the host.
- ``norm`` is a new float32 0-dim tensor: the ``norm_type`` norm of all gradients together, taken as one flat
  vector, *multiplied by inv_scale* (not for ``norm_type`` 0). Chunks of at most 65536 elements are summed in
  float32. The sums of chunks are added in float64 or as a tree in fixed order. So the norm is correct to 1e-6
  and the same in every run. It is inf or nan if a gradient is.
- ``found_inf`` is a new float32 0-dim tensor, exactly 0.0 or 1.0. It is 1.0 if any element, or the value that
  is written for it, is not finite. The square of an element is not tested.
- ``flags`` is a new uint8 tensor ``[len(grads)]``: bit 0 inf, bit 1 nan.
- The three ops on weights take float32, bfloat16 and int16 tensors of any strides and sizes.
- Mutating kernels increase the version counter of each tensor that they write. A factor of exactly 1 writes
  nothing.

:mod:`amp_plugin.kernels.reference` defines in plain torch what each op does. It also serves each device that
has no faster kernel.
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
"""The values of ``hysteresis_mode`` by name; see ``reference.update_scale_``."""

SPIKE_ACTIONS: Final = {"skip": 0, "clip": 1, "raise": 2}
"""What ``action`` of ``judge_step_`` means; see ``reference.judge_step_``."""

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


FAKES: Final[dict[str, Callable[..., Any]]] = {  # only for ops that return something
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
        LIBRARY.define(f"_plain_{name}{schema}")  # type: ignore[no-untyped-call] # what C++ falls back to
        LIBRARY.impl(f"_plain_{name}", untraced(plain), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


_define()
register_cuda_kernels(LIBRARY)
