"""A child process that times ops on CUDA tensors without a GPU, with an emulated CUDA driver.

The parent process sends lines such as ``norm_check 400``. The child process answers with the time
of one ``norm_check`` of 400 tensors, in microseconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache

import torch

from tests.host_device import host_device

host_device.install_if_loaded()

from amp_plugin.kernels import ops  # noqa: E402, F401 - defines the ops, once the device is there
from amp_plugin.kernels.build import native_core  # noqa: E402
from amp_plugin.kernels.cuda.register import cuda_core  # noqa: E402

OP = torch.ops.amp_plugin
LEDGER = native_core().extension.GradientLedger


@cache
def call_of(op: str, count: int) -> Callable[[], object]:
    """Return a function that calls ``op`` on gradients at fixed addresses, as in most training steps."""
    params = [torch.nn.Parameter(torch.zeros(64, device="cuda")) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    factor = torch.tensor(0.5, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "norm_check": lambda: LEDGER.norm_check(params, factor, 2.0),
        "unscale_": lambda: LEDGER.unscale_(params, factor, 2.0),
        "multiply_": lambda: LEDGER.multiply_(params, factor),
        "survey": lambda: LEDGER.survey(params),
        "clip_factor": lambda: OP.clip_factor(factor, 1.0, factor),
    }
    return calls[op]


def microseconds(op: str, count: int) -> float:
    """Return the time of one call."""
    call, repeats = call_of(op, count), max(5, 2000 // count)
    call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


def main() -> None:
    """Answer requests until the parent process closes the pipe."""
    if not cuda_core(0).loaded:
        sys.exit(cuda_core(0).reason)
    for op in ("norm_check", "unscale_", "multiply_", "survey", "clip_factor"):
        call_of(op, 1)()  # the first call loads the kernel
    torch.ops.host_device.launches_do_nothing(True)
    print("ready", flush=True)
    for line in sys.stdin:
        op, count = line.split()
        print(microseconds(op, int(count)), flush=True)


if __name__ == "__main__":
    main()
