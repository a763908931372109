"""Who serves CUDA tensors: our kernels, or plain torch with one warning."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from amp_plugin.kernels import ops, reference
from amp_plugin.kernels.cuda import register
from amp_plugin.kernels.cuda.operations import Operations
from amp_plugin.kernels.cuda.register import CudaCore, cuda_core
from tests.cuda_emulation.emulated_kernels import EmulatedDevice, compiler, object_folder


@pytest.fixture
def undecided(monkeypatch):
    """A process in which no CUDA tensor has been seen, on a machine where cuda:0 exists."""
    monkeypatch.setattr(register, "_operations", {})
    monkeypatch.setattr(register, "_reasons", {})
    monkeypatch.setattr(register, "_no_cuda", lambda: "")
    monkeypatch.setattr(register, "_device_of", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("AMP_PLUGIN_NATIVE", raising=False)


def test_every_op_has_a_cuda_kernel():
    assert set(register.OPS) == set(ops.SCHEMAS)
    for name in register.OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_plugin::{name}", "CUDA")


@pytest.mark.usefixtures("undecided")
def test_without_cuda_core_plain_torch_trains_with_one_warning(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "amp_plugin.kernels.cuda.launcher", None
    )  # its import raises ImportError

    def step():
        grads = [torch.full((5,), 4.0)]
        norm, found_inf, _ = register._kernel("unscale_")(grads, torch.tensor(0.25), 2.0)
        register._kernel("cast")(grads, [torch.empty(5, dtype=torch.float16)])
        return grads, norm, found_inf

    message = r"plain torch takes over: .*pip install --upgrade 'cuda-core>="
    with pytest.warns(RuntimeWarning, match=message) as seen:
        step()
    assert len(seen) == 1
    grads, norm, found_inf = step()  # a second warning would be an error
    assert (norm.item(), found_inf.item(), grads[0].tolist()) == (pytest.approx(5**0.5), 0.0, [1.0] * 5)
    core = cuda_core()
    assert not core.loaded
    assert "install or update cuda-core" in core.reason


@pytest.mark.usefixtures("undecided")
def test_a_driver_that_fails_is_named(monkeypatch):
    pytest.importorskip("cuda.core")
    from amp_plugin.kernels.cuda import launcher

    class Failing:
        def __init__(self, device):
            raise RuntimeError("the driver is too old")

    monkeypatch.setattr(launcher, "CudaLauncher", Failing)
    with pytest.warns(
        RuntimeWarning, match="not available on cuda:0, .* RuntimeError: the driver is too old"
    ):
        assert cuda_core(0) == CudaCore(loaded=False, reason="RuntimeError: the driver is too old")


@pytest.mark.usefixtures("undecided")
def test_native_code_turned_off_is_silent(monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_core() == CudaCore(
            loaded=False, reason="AMP_PLUGIN_NATIVE=0 turns native code off; unset it"
        )


@pytest.mark.usefixtures("undecided")
def test_the_kernels_of_a_device_are_loaded_once(monkeypatch):
    loads = []
    monkeypatch.setattr(register, "_load", lambda index: loads.append(index) or reference)
    for name in ("norm_check", "norm_check", "multiply_"):
        register._kernel(name)([torch.ones(2)], torch.tensor(0.5))
    assert loads == [0]


@pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")
def test_the_dispatcher_calls_the_kernels_with_what_they_take(monkeypatch):
    """The same functions behind the same schemas, for CPU tensors and the emulated device."""
    served = Operations(EmulatedDevice(object_folder()))
    monkeypatch.setattr(register, "_device_of", lambda _: 0)
    monkeypatch.setattr(register, "_operations_of", lambda _: served)
    library = torch.library.Library("amp_plugin_emulated", "DEF")
    for name, schema in ops.SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, register._kernel(name), "CPU")
    emulated, half = torch.ops.amp_plugin_emulated, torch.tensor(0.5)
    for norm_type in ((), (2.0,), (1.0,)):  # defaults may or may not reach the kernel
        grads = [torch.randn(5), torch.randn(3, dtype=torch.float64)]
        want = reference.norm_check(grads, half, *norm_type)
        for got, expected in zip(emulated.norm_check(grads, half, *norm_type), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)
    utils = {"test_utils": ("test_schema",)}  # what is written is what the schema says
    torch.library.opcheck(emulated.norm_check, (grads, half), **utils)
    torch.library.opcheck(emulated.unscale_, (grads, half, 1.0), **utils)
    torch.library.opcheck(emulated.multiply_, (grads, half), **utils)
    torch.library.opcheck(emulated.cast, (grads, [grad.half() for grad in grads]), **utils)
    torch.library.opcheck(emulated.clip_factor, (half, 1.0), **utils)
    torch.library.opcheck(emulated.clip_factor, (half, 1.0, half), **utils)
    state = (torch.tensor(4.0), torch.zeros((), dtype=torch.int32), torch.ones((), dtype=torch.int32))
    rule = (torch.tensor(1.0), 2.0, 0.5, 2000, 0.0, 8.0, 1, 0)
    torch.library.opcheck(emulated.update_scale_, (*state, *rule), **utils)


def test_the_device_is_that_of_the_scale_or_of_the_outputs():
    class Stub(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 3)

    on_three = torch.ones(1).as_subclass(Stub)
    assert register._device_of(([], on_three, 2.0)) == 3
    assert register._device_of(([on_three], [on_three])) == 3
    assert register._device_of((on_three, on_three, on_three, on_three)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_a_machine_without_cuda_says_so():
    core = cuda_core()
    assert not core.loaded
    assert "CUDA" in core.reason


def test_registering_neither_starts_cuda_nor_loads_the_launcher():
    code = (
        "import sys, torch, amp_plugin.kernels.ops; "
        "assert not torch.cuda.is_initialized(); "
        "assert 'amp_plugin.kernels.cuda.launcher' not in sys.modules; "
        "assert 'amp_plugin.kernels.cuda.compile' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
