"""What the launcher asks of the CUDA driver, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core")

from amp_plugin.kernels.cuda import launcher as module
from amp_plugin.kernels.cuda.catalogue import MULTIPLY, UPDATE_SCALE, WRITE_TABLE
from amp_plugin.kernels.cuda.launcher import CudaLauncher
from amp_plugin.kernels.cuda.tensor_table import ROW, ROWS_BY_VALUE

RELAXED = "relaxed"


class Driver:
    """The five driver calls of the launcher."""

    CUkernel = int
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)

    def __init__(self):
        self.launches, self.mode, self.modes, self.status, self.load_status = [], "global", [], 0, 0

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self.launches.append(
            SimpleNamespace(function=function, grid=(gx, gy, gz), block=(bx, by, bz), stream=stream)
        )
        assert (shared, extra) == (0, 0)
        self.read(parameters)
        return (self.status,)

    def read(self, parameters):
        pass

    def cuKernelGetFunction(self, kernel):
        assert self.mode == RELAXED
        return self.load_status, f"function of {kernel}"

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, old = mode, self.mode
        self.modes.append(mode)
        return 0, old


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    fake.bound = []
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="a GPU")
    monkeypatch.setattr(module, "driver", fake)
    monkeypatch.setattr(
        module, "Device", lambda index: SimpleNamespace(set_current=lambda: fake.bound.append(index))
    )
    loaded = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=len(name)))
    monkeypatch.setattr(module, "ObjectCode", SimpleNamespace(from_cubin=lambda _: loaded))
    fake.compiled = []
    monkeypatch.setattr(module, "cached_cubin", lambda *what: fake.compiled.append(what) or b"")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fake.properties = properties
    return fake


def a_launcher():
    return CudaLauncher(torch.device("cuda", 0))


def test_arguments_reach_the_driver_by_address(driver):
    seen = []

    def read(parameters):
        addresses = (ctypes.c_void_p * 2).from_address(parameters)
        seen.append(ctypes.c_uint64.from_address(addresses[0]).value)
        seen.append(ctypes.c_float.from_address(addresses[1]).value)

    driver.read = read
    a_launcher().launch(MULTIPLY, 12, (ctypes.c_uint64(2**40 + 1), ctypes.c_float(0.5)))
    assert seen == [2**40 + 1, 0.5]
    (launch,) = driver.launches
    assert (launch.grid, launch.block, launch.stream) == ((12, 1, 1), (256, 1, 1), 77)
    assert launch.function == f"function of {len('multiply')}"


def test_a_kernel_is_loaded_once_for_its_architecture(driver):
    launcher = a_launcher()
    threads = [
        threading.Thread(target=launcher.launch, args=(UPDATE_SCALE, 1, (ctypes.c_int(0),))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.compiled == [(UPDATE_SCALE, "sm_90")]
    assert len(driver.launches) == 8


def test_every_thread_makes_the_context_its_own_once(driver):
    launcher = a_launcher()
    for _ in range(3):
        launcher.launch(UPDATE_SCALE, 1, (ctypes.c_int(0),))
    thread = threading.Thread(target=launcher.launch, args=(UPDATE_SCALE, 1, (ctypes.c_int(0),)))
    thread.start()
    thread.join()
    assert driver.bound == [0, 0]


def test_code_is_loaded_outside_of_a_capture_that_then_goes_on(driver):
    launcher = a_launcher()
    launcher.load(MULTIPLY)
    assert driver.modes == [RELAXED, "global"]
    driver.load_status = 200
    with pytest.raises(
        RuntimeError, match=r"cannot load update_scale for sm_90, compiled by NVRTC .* \(200\)"
    ):
        launcher.load(UPDATE_SCALE)
    assert driver.mode == "global"


def test_code_that_the_driver_does_not_know_says_what_to_update(driver, monkeypatch):
    def get_kernel(name):
        raise OSError("CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(
        module, "ObjectCode", SimpleNamespace(from_cubin=lambda _: SimpleNamespace(get_kernel=get_kernel))
    )
    message = r"NVRTC \d+\.\d+ \(CUDA_ERROR_INVALID_IMAGE\); update the driver to that major version of CUDA"
    with pytest.raises(RuntimeError, match=message) as error:
        a_launcher().load(UPDATE_SCALE)
    assert isinstance(error.value.__cause__, OSError)
    assert driver.mode == "global"


def test_a_refused_launch_is_an_error(driver):
    driver.status = 700
    with pytest.raises(RuntimeError, match=r"refused multiply \(3 blocks\) on cuda:0: 700"):
        a_launcher().launch(MULTIPLY, 3, (ctypes.c_int(0),))


def test_devices_that_are_too_old_are_refused(driver):
    driver.properties.major = 7
    with pytest.raises(
        RuntimeError, match=r"a GPU has compute capability \(7, 0\); the CUDA kernels need 7.5"
    ):
        a_launcher()


def test_in_a_capture_rows_travel_as_arguments(driver):
    launcher = a_launcher()
    launcher.device = torch.device("cpu", 0)  # so that the table can be allocated
    rows = np.zeros(ROWS_BY_VALUE + 3, dtype=ROW)
    rows["numel"] = np.arange(len(rows))
    calls = []

    def read(parameters):
        by_value, count, target = (ctypes.c_void_p * 3).from_address(parameters)
        number = ctypes.c_uint32.from_address(count).value
        given = np.frombuffer(ctypes.string_at(by_value, ROWS_BY_VALUE * ROW.itemsize), dtype=ROW)[:number]
        calls.append((given["numel"].tolist(), ctypes.c_uint64.from_address(target).value))

    driver.read = read
    table = launcher.upload(rows)
    assert table.nbytes == rows.nbytes
    (first, begin), (rest, behind) = calls
    assert first + rest == list(range(len(rows)))
    assert (begin, behind - begin) == (table.data_ptr(), ROWS_BY_VALUE * ROW.itemsize)
    assert driver.compiled == [(WRITE_TABLE, "sm_90")]


def test_rows_are_pinned_on_the_host_whatever_the_default_device(driver, monkeypatch):
    launcher, empty, pinned = a_launcher(), torch.empty, []
    with torch.device("meta"):
        assert empty(0).is_meta
    launcher.device = torch.device("cpu", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make(*size, pin_memory=False, **options):  # there is nothing to pin memory for
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", make)
    rows = np.zeros(3, dtype=ROW)
    rows["numel"] = (1, 2, 3)
    with torch.device("meta"):
        table = launcher.upload(rows)
    assert table.numpy().view(ROW)["numel"].tolist() == [1, 2, 3]
    assert pinned == [False, True]
