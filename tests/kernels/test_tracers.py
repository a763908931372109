"""Blocks of ours that no tracer is to see run wherever they are called."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_plugin.kernels.tracers import outside_tracers


class CallsInside(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with outside_tracers():
            return func(*args, **(kwargs or {}))


def test_a_block_runs_inside_a_mode_too():
    """The first region or GPU op of a process may be met there; torch refuses to change a tracer's state."""
    with CallsInside():
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
