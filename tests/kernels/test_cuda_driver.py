"""The calls to the CUDA driver that load kernels, made to a driver that only records them."""

import subprocess

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda import all_kernels, tuning_of
from amp_plugin.kernels.cuda.compile import all_cubins, identity_of
from tests.host_device.emulation.emulated_kernels import HERE, compiler
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

ASKS = "print(register.cuda_core(0), flush=True)\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folders = {}
    for name, options in (("whole", []), ("old", ["-DWITHOUT_GRAPHS"])):
        folders[name] = tmp_path_factory.mktemp(name)
        command = [compiler(), "-std=c++20", "-shared", "-fPIC", *options, "-Wl,-soname,libcuda.so.1"]
        sources = ["-o", "libcuda.so.1", str(HERE / "driver.cpp")]
        subprocess.run([*command, *sources], cwd=folders[name], check=True)

    def on_the_driver(code, driver="whole", **variables):
        # Once this library is loaded, dlopen finds it by its soname.
        load = f"import ctypes; ctypes.CDLL({str(folders[driver] / 'libcuda.so.1')!r})\n" if driver else ""
        program = folders["whole"] / "program.py"
        program.write_text(load + ON_THE_DRIVER + code)
        done = run_program(program, variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    all_cubins("sm_90")  # compile now, because NVRTC needs more functions of a driver
    on_the_driver("register.native_core()", driver=None)  # compile the core now, because that prints a line
    return on_the_driver


def test_all_kernels_are_loaded_when_the_device_is_opened(run):
    """They are loaded in the device's context and outside a capture, so no later step can fail."""
    lines, errors = run(ASKS * 2)
    blocks = [132 * tuning_of(kernel).blocks for kernel in all_kernels()]
    core = f"CudaCore(loaded=True, reason='', architecture='sm_90', identity={identity_of('sm_90', blocks)})"
    assert lines[:2] == ["context 0", "capture mode 2"]
    assert lines[-7:] == [
        "capture mode 2",
        "memory 4194304",
        "capture mode 2",
        "capture mode 0",
        "context -1",
        core,
        core,
    ]
    loaded = lines[2:-7]
    assert loaded[::2] == ["library of machine code"] * (len(loaded) // 2)
    assert sorted(loaded[1::2]) == sorted(f"function {kernel.name}" for kernel in all_kernels())
    assert not errors


def test_a_driver_that_does_not_take_the_code_is_told_of(run):
    lines, errors = run(ASKS, FAKE_LOAD_ERROR="222")
    first = next(iter(all_kernels())).name
    assert f"the CUDA driver cannot load {first} (CUDA_ERROR_OF_A_TEST 222, an error" in lines[-1]
    assert "update the driver" in lines[-1]
    assert "for sm_90" in lines[-1]
    assert "loaded=False" in lines[-1]
    assert errors.count("plain torch is used") == 1


def test_code_that_is_loaded_on_a_gpu_of_another_architecture_is_told_of(run):
    """CUDA_MODULE_LOADING=EAGER makes the driver report the mismatch immediately."""
    lines, _ = run(ASKS, FAKE_LOAD_ERROR="209")
    assert "the GPUs have different architectures; unset CUDA_MODULE_LOADING" in lines[-1]


@pytest.mark.parametrize(
    ("driver", "error"),
    [
        ("old", "the CUDA driver has no cuGraphRetainUserObject; update it to CUDA 12 or newer"),
        (None, "the CUDA driver cannot be loaded (libcuda.so.1: cannot open"),
    ],
)
def test_a_driver_that_is_too_old_or_missing_is_told_of(run, driver, error):
    lines, _ = run(ASKS, driver=driver)
    assert error in lines[-1]
