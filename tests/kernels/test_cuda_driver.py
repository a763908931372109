"""The launcher on the real cuda-core and cuda-bindings, with a driver that only takes notes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda.catalogue import MULTIPLY, UPDATE_SCALE, WRITE_TABLE
from amp_plugin.kernels.cuda.compile import cached_cubin
from tests.cuda_emulation.emulated_kernels import HERE, compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="the driver needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver"),
]

ON_THE_DRIVER = """
import ctypes, threading
from types import SimpleNamespace
import torch
import torch.cuda as cuda
cuda.get_device_properties = lambda _: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
cuda.current_device = lambda: 0
cuda.current_stream = lambda _: SimpleNamespace(cuda_stream=77)
"""

LAUNCHES = """
from amp_plugin.kernels.cuda.catalogue import MULTIPLY
from amp_plugin.kernels.cuda.launcher import CudaLauncher
launcher = CudaLauncher(torch.device("cuda", 0))
arguments = ctypes.c_uint64(2**40 + 1), ctypes.c_float(0.5)
launcher.launch(MULTIPLY, 12, arguments)
launcher.launch(MULTIPLY, 2**31 - 1, arguments)
thread = threading.Thread(target=launcher.launch, args=(MULTIPLY, 1, arguments))
thread.start()
thread.join()
"""

ASKS = """
from amp_plugin.kernels.cuda import register
register._no_cuda = lambda: ""
print(register.cuda_core(0), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler(), "-std=c++20", "-shared", "-fPIC", "-o", "libcuda.so.1", str(HERE / "driver.cpp")]
    subprocess.run(command, cwd=folder, check=True)
    environment = {**os.environ, "AMP_PLUGIN_CACHE_DIR": str(folder / "cache")}
    environment.pop("AMP_PLUGIN_NATIVE", None)
    with pytest.MonkeyPatch.context() as patch:  # NVRTC itself would ask more of a driver
        patch.setenv("AMP_PLUGIN_CACHE_DIR", environment["AMP_PLUGIN_CACHE_DIR"])
        for kernel in (MULTIPLY, UPDATE_SCALE, WRITE_TABLE):
            cached_cubin(kernel, "sm_90")

    def on_the_driver(code, **variables):
        done = subprocess.run(
            [sys.executable, "-c", ON_THE_DRIVER + code],
            env={**environment, "LD_LIBRARY_PATH": str(folder), **variables},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    return on_the_driver


def test_what_reaches_the_driver(run):
    lines, _ = run(LAUNCHES)
    launch = "launch multiply <<<{} 1 1, 256 1 1, 0, 77>>> on 0: 1099511627777 0.5"
    assert lines == [
        "context 0",
        "capture mode 2",  # relaxed, while code is loaded
        "library of machine code",
        "capture mode 0",
        launch.format(12),
        launch.format(2**31 - 1),
        "context 0",  # of the other thread
        launch.format(1),
    ]


def test_a_driver_that_does_not_take_the_code_is_told_of(run):
    lines, errors = run(ASKS, FAKE_LOAD_ERROR="222")
    assert "cannot load update_scale for sm_90, compiled by NVRTC" in lines[-1]
    assert "CUDA_ERROR_OF_A_TEST" in lines[-1]
    assert "update the driver" in lines[-1]
    assert "loaded=False" in lines[-1]
    assert errors.count("plain torch takes over") == 1


def test_a_driver_that_does_serves(run):
    lines, errors = run(ASKS)
    assert lines[-1] == "CudaCore(loaded=True, reason='')"
    assert not errors
