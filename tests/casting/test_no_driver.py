"""A CUDA build of torch without a driver.

After it has made fake tensors, its guard claims that there is a device.
"""

import subprocess

import pytest
import torch

from tests.host_device.emulation.emulated_kernels import compiler, torch_headers, torch_libraries
from tests.warm_processes import run_program

# This is what torch's _ensureCUDADeviceGuardSet() does. Builds without CUDA do not have it.
GUARD = """
#include <c10/core/impl/FakeGuardImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void stand_in() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""
PROGRAM = """
import ctypes
import torch
import amp_plugin
from amp_plugin.kernels.build import native_core

assert native_core().loaded
ctypes.CDLL({library!r}).stand_in()
model = torch.nn.Linear(3, 3)
with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
    model(torch.ones(2, 3)).float().sum().backward()
torch.optim.SGD(model.parameters(), lr=1.0).step()
print("stepped")
"""


@pytest.mark.native
@pytest.mark.skipif(compiler() is None, reason="the guard needs g++")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_step_asks_no_device_that_is_not_there(tmp_path):
    library, source, program = (tmp_path / name for name in ("guard.so", "guard.cpp", "program.py"))
    source.write_text(GUARD)
    command = [compiler(), "-std=c++20", "-shared", "-fPIC", *torch_headers(), source, "-o", library]
    subprocess.run([*command, *torch_libraries("c10")], check=True)
    program.write_text(PROGRAM.format(library=str(library)))
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stepped\n"
