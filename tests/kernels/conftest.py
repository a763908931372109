"""The implementations that the kernel tests call: C++, plain torch, and CUDA."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from amp_plugin.kernels import ops, reference  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.build import native_core
from amp_plugin.kernels.cuda.register import cuda_core
from tests.host_device import host_device

OP = torch.ops.amp_plugin
ON = [
    "op",
    "reference",
    *(pytest.param(order, marks=pytest.mark.gpu) for order in ("ascending", "descending")),
]


@dataclass
class Kernels:
    device: torch.device
    ops: object
    name: str

    def chunk(self, dtype: torch.dtype) -> int:
        """Return how many elements a thread or block processes at a time.

        On a GPU they fill kGranuleBytes.
        """
        return 4096 // dtype.itemsize if self.device.type == "cuda" else 32768

    def sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        chunk = self.chunk(dtype)
        return (0, 1, 15, 16, 17, chunk - 1, chunk, chunk + 1)


@contextmanager
def cuda_in_order(order):
    """Yield a GPU, or an emulated one whose threads and blocks run in this order."""
    if host_device.LOADED:
        torch.ops.host_device.descending(order == "descending")
    elif order == "descending":
        pytest.skip("a GPU chooses the order itself")
    core = cuda_core(0)
    assert core.loaded, core.reason
    yield torch.device("cuda", 0)
    if host_device.LOADED:
        torch.ops.host_device.descending(False)


@pytest.fixture(scope="module", params=ON)
def on(request):
    """Yield the CPU's kernels, the plain torch ones, and those on a GPU."""
    if request.param in {"op", "reference"}:
        name = request.param if native_core().loaded else "reference"  # the implementation that runs the op
        yield Kernels(torch.device("cpu"), OP if request.param == "op" else reference, name)
        return
    with cuda_in_order(request.param) as device:
        yield Kernels(device, OP, request.param)


@pytest.fixture(params=["ascending", "descending"])
def device(request):
    with cuda_in_order(request.param) as device:
        yield device


@pytest.fixture
def cuda_kernels():
    core = cuda_core(0)
    assert core.loaded, core.reason


@pytest.fixture(params=["op", "reference"])
def kernel(request):
    """Return the ops registered for the CPU (native if there is a core), and the plain torch ones."""
    native_core()
    return OP if request.param == "op" else reference


@pytest.fixture
def numbers_of_threads():
    """Yield 1, 2 and 3. While the test uses a number, torch has that many threads."""
    before = torch.get_num_threads()
    yield (torch.set_num_threads(count) or count for count in (1, 2, 3))
    torch.set_num_threads(before)
