"""All ranks compute with the same code, or say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
