"""All ranks compute with the same code, or say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_plugin.scaling import collectives
from amp_plugin.scaling.collectives import Groups, Ranks
from amp_plugin.scaling.gradients import Measurement

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("others", "missing"),
    [((1.0, 0.0), None), ((0.0, 0.0), "native core"), ((1.0, 1.0), "CUDA kernels")],
    ids=["alike", "without the native core", "with CUDA kernels"],
)
def test_ranks_with_other_code_are_refused(monkeypatch, others, missing):
    """The other rank has what is given; this one has the native core and no CUDA kernels."""

    def all_reduce(tensor, op, group):
        other = torch.tensor(others, device=tensor.device)
        if tensor.shape == (2, 2):
            tensor.copy_(torch.maximum(tensor, torch.stack([other, -other])))

    monkeypatch.setattr(collectives, "native_core", lambda: SimpleNamespace(loaded=True))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    one = torch.ones(())
    measured = [Measurement(one, torch.zeros(()), torch.zeros(1, dtype=torch.uint8))]

    def combine():
        return Ranks(Groups(agree=(None,))).combine(measured, 2.0, CPU, ())

    if missing is None:
        assert combine()[0].item() == 1.0
    else:
        with pytest.raises(RuntimeError, match=f"some ranks have amp_plugin's {missing} and others do not"):
            combine()


class OpsSeen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_few_small_ops_stand_around_the_collective(monkeypatch):
    """On a GPU each is a launch."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: None)
    measured = [Measurement(torch.full((), 3.0), torch.zeros(()), torch.zeros(1, dtype=torch.uint8))]
    ranks = Ranks(Groups(agree=(None,)))
    ranks.combine(measured, 2.0, CPU, ())  # the ranks agree on their core
    with OpsSeen() as seen:
        norm, found = ranks.combine(measured, 2.0, CPU, ())
    assert (norm.item(), found.item()) == (3.0, 0.0)
    launches = [name for name in seen.names if name not in {"select", "unbind"}]
    assert launches == ["_to_copy", "_to_copy", "pow", "stack", "pow", "_to_copy", "gt", "_to_copy"]
