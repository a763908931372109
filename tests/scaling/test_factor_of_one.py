"""Gradients without a loss scale are multiplied by 1: a tensor that is made once for each device and stream."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_plugin import GradScaler
from tests.scaling.ops_seen import OpsSeen

pytestmark = pytest.mark.native


def ones_of_a_clip(*, whole=True, device="cpu"):
    """Return how many ones the first clip under a new scaler makes."""
    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (3, 5)]
    scaler = GradScaler(device, enabled=False)
    for param in params:
        param.grad = torch.ones_like(param)
    with OpsSeen() as seen:
        norm = scaler.clip_grad_norm_(torch.optim.SGD(params, lr=0.1) if whole else params, 0.5)
    assert norm.item() == pytest.approx(8**0.5)
    assert seen.names.count("norm_check") == 1
    return seen.names.count("ones")


@pytest.mark.parametrize("whole", [True, False], ids=["an optimizer", "a list"])
def test_a_second_measure_makes_none(whole):
    ones_of_a_clip(whole=whole)
    assert ones_of_a_clip(whole=whole) == 0


@pytest.mark.gpu
def test_each_device_and_stream_has_its_own():
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            assert [ones_of_a_clip(device=f"cuda:{index}") for _ in range(3)] == [1, 0, 0]


@pytest.mark.gpu
def test_one_that_is_captured_is_not_kept():
    """It is 1 in a replay alone."""
    with torch.cuda.stream(torch.cuda.Stream()):
        params = [torch.nn.Parameter(torch.ones(3, device="cuda"))]
        params[0].grad = torch.ones_like(params[0])
        scaler = GradScaler("cuda", enabled=False)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        scaler.clip_grad_norm_(params, 0.5)
        graph.capture_end()
        assert ones_of_a_clip(device="cuda") == 1


def test_fake_tensors_leave_none_and_take_none():
    """They stand for tensors that are not there; a real one among them is an error."""
    for _ in range(2):
        with FakeTensorMode():
            param = torch.nn.Parameter(torch.ones(3))
            param.grad = torch.ones(3)
            norm = GradScaler("cpu", enabled=False).clip_grad_norm_([param], 0.5)
            assert isinstance(norm, FakeTensor)
        assert type(ones_of_a_clip()) is int
