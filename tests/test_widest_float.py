"""Does a device without float64 get float32, whatever its name is?"""

import pytest
import torch

from amp_plugin import hardware
from amp_plugin.hardware import in_widest_float, widest_float


@pytest.fixture(autouse=True)
def _asked_again():
    widest_float.cache_clear()
    yield
    widest_float.cache_clear()


def answers(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[torch.device]:
    """Imitate a device that this machine lacks. Return the devices that were queried."""
    asked = []

    def ones(*size, dtype, device):
        asked.append(device)
        if error is not None and dtype is torch.float64:
            raise error
        return torch.zeros(*size, dtype=dtype) + 1

    monkeypatch.setattr(hardware.torch, "ones", ones)
    return asked


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (TypeError("Cannot convert a MPS Tensor to float64 dtype"), torch.float32),
        (RuntimeError("Required aspect fp64 is not supported on the device"), torch.float32),
        (None, torch.float64),
    ],
)
def test_a_device_is_asked_once_and_not_known_by_name(device, error, wanted, monkeypatch):
    asked = answers(monkeypatch, error)
    assert [widest_float(torch.device(device)) for _ in range(3)] == [wanted] * 3
    assert asked == [torch.device(device)]


def test_the_cpu_is_not_asked(monkeypatch):
    asked = answers(monkeypatch, RuntimeError("asked"))
    assert in_widest_float(torch.zeros(2, dtype=torch.bfloat16)).dtype is torch.float64
    assert not asked


def test_a_tracer_does_not_see_the_question():
    """The result is the device's, even if the first caller runs under a fake-tensor mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inside = widest_float(torch.device("mps"))
    widest_float.cache_clear()
    assert inside is widest_float(torch.device("mps"))
