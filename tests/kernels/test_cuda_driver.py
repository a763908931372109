"""What loading a kernel asks of the CUDA driver, with a driver that only takes notes."""

from __future__ import annotations

import subprocess

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda.catalogue import MULTIPLY, UPDATE_SCALE
from amp_plugin.kernels.cuda.compile import cached_cubin
from tests.cuda_emulation.emulated_kernels import HERE, compiler
from tests.warm_processes import run_program

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="the driver needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver"),
    pytest.mark.native,
]

ON_THE_DRIVER = """
from types import SimpleNamespace
import torch
torch.version.cuda = "13.0"  # so the native core is compiled with what launches kernels
torch.cuda.get_device_properties = lambda _: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
from amp_plugin.kernels import ops
from amp_plugin.kernels.cuda import register
register._no_cuda = lambda: ""
"""

LOADS = """
print(register.cuda_core(0), flush=True)
for _ in range(2):
    torch.ops.amp_plugin._cuda_load(0, "multiply", "")
"""
ASKS = "print(register.cuda_core(0), flush=True)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folders = {}
    for name, options in (("whole", []), ("old", ["-DWITHOUT_GRAPHS"])):
        folders[name] = tmp_path_factory.mktemp(name)
        command = [compiler(), "-std=c++20", "-shared", "-fPIC", *options, "-Wl,-soname,libcuda.so.1"]
        sources = ["-o", "libcuda.so.1", str(HERE / "driver.cpp")]
        subprocess.run([*command, *sources], cwd=folders[name], check=True)

    def on_the_driver(code, driver="whole", **variables):
        # A library that is loaded is found by its soname.
        load = f"import ctypes; ctypes.CDLL({str(folders[driver] / 'libcuda.so.1')!r})\n" if driver else ""
        program = folders["whole"] / "program.py"
        program.write_text(load + ON_THE_DRIVER + code)
        done = run_program(program, variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    for kernel in (MULTIPLY, UPDATE_SCALE):  # NVRTC itself would ask more of a driver
        cached_cubin(kernel, "sm_90")
    on_the_driver("register.native_core()", driver=None)  # compiles it where nobody has, and says so
    return on_the_driver


def loading(name):
    """Code is loaded in the device's context and outside of a capture; then both are as before."""
    return [
        "context 0",
        "capture mode 2",
        "library of machine code",
        f"function {name}",
        "capture mode 0",
        "context -1",
    ]


def test_what_reaches_the_driver(run):
    lines, errors = run(LOADS)
    assert lines == [
        *loading("update_scale"),
        "CudaCore(loaded=True, reason='', architecture='sm_90')",
        *loading("multiply"),  # once
    ]
    assert not errors


def test_a_driver_that_does_not_take_the_code_is_told_of(run):
    lines, errors = run(ASKS, FAKE_LOAD_ERROR="222")
    assert "the CUDA driver cannot load update_scale (CUDA_ERROR_OF_A_TEST 222, an error" in lines[-1]
    assert "update the driver" in lines[-1]
    assert "for sm_90" in lines[-1]
    assert "loaded=False" in lines[-1]
    assert errors.count("plain torch takes over") == 1


def test_a_driver_that_is_too_old_is_told_of(run):
    lines, _ = run(ASKS, driver="old")
    assert "the CUDA driver has no cuGraphRetainUserObject; update it to CUDA 12 or newer" in lines[-1]


def test_a_machine_without_a_driver_is_told_of(run):
    lines, _ = run(ASKS, driver=None)
    assert "the CUDA driver cannot be loaded (libcuda.so.1: cannot open" in lines[-1]
