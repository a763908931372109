"""Without a loss scale, gradients are multiplied by a tensor of 1, which is made once per device and stream."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_plugin import GradScaler
from tests.scaling.ops_seen import OpsSeen

pytestmark = pytest.mark.native


def clip(device="cpu", *, whole=False):
    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (3, 5)]
    for param in params:
        param.grad = torch.ones(param.shape, device=device)
    target = torch.optim.SGD(params, lr=0.1) if whole else params
    scaler = GradScaler(device, enabled=False)
    with OpsSeen() as seen:
        norm = scaler.clip_grad_norm_(target, 0.5)
    return norm, seen.names.count("ones")


def test_a_second_measure_makes_none():
    clip()
    for whole in (False, True):
        norm, ones = clip(whole=whole)
        assert (norm.item(), ones) == (pytest.approx(8**0.5), 0)


@pytest.mark.gpu
def test_each_device_and_stream_has_its_own():
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            assert [clip(f"cuda:{index}")[1] for _ in range(3)] == [1, 0, 0]


@pytest.mark.gpu
def test_one_that_is_captured_is_not_kept():
    """A captured tensor has the value 1 only after a replay."""
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        clip("cuda")
        graph.capture_end()
        assert clip("cuda")[1] == 1


def test_fake_tensors_leave_none_and_take_none():
    """Fake tensors have no memory, and mixing them with a real tensor is an error."""
    for _ in range(2):
        with FakeTensorMode():
            assert isinstance(clip()[0], FakeTensor)
        assert clip()[0].item() == pytest.approx(8**0.5)
