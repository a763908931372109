"""CUDA tensors are processed by our kernels, or by plain torch after one warning."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from amp_plugin.kernels import ops
from amp_plugin.kernels.cuda import register
from amp_plugin.kernels.cuda.register import CudaCore, cuda_core
from amp_plugin.kernels.tracers import outside_tracers
from tests.kernels.test_ops import OPCHECKS


@pytest.fixture
def undecided(monkeypatch):
    """Set up a process that has seen no CUDA tensor yet, on a machine where cuda:0 exists."""
    monkeypatch.setattr(register, "_cores", {})
    monkeypatch.setattr(register, "_no_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.delenv("AMP_PLUGIN_NATIVE", raising=False)
    return properties


@pytest.mark.gpu
@pytest.mark.native
@pytest.mark.parametrize("name", ["norm_check", "unscale_", "multiply_", "update_scale_", "clip_factor"])
def test_cuda_tensors_go_to_cpp(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_plugin::{name}", "CUDA")
    file = "scalar_ops.cpp" if name in {"update_scale_", "clip_factor"} else "cuda_ops.cpp"
    assert file in torch._C._dispatch_dump(f"amp_plugin::{name}")


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_every_op_has_a_plain_one_of_the_same_schema(name):
    schema = str(getattr(torch.ops.amp_plugin, name).default._schema)
    plain = str(getattr(torch.ops.amp_plugin, f"_plain_{name}").default._schema)
    assert plain == schema.replace("::", "::_plain_")


@pytest.mark.usefixtures("undecided")
@pytest.mark.native
def test_without_cuda_core_there_is_one_warning(monkeypatch):
    # importing it raises ImportError
    monkeypatch.setitem(sys.modules, "amp_plugin.kernels.cuda.compile", None)
    message = r"so plain torch is used: .*pip install --upgrade 'cuda-core>="
    with pytest.warns(RuntimeWarning, match=message) as seen:
        assert not torch.ops.amp_plugin._cuda_prepare(0)
    assert len(seen) == 1
    core = cuda_core()  # a second warning would be an error
    assert not core.loaded
    assert "install or update cuda-core" in core.reason


@pytest.mark.native
@pytest.mark.parametrize("missing", ["a newer GPU", "the core"])
def test_what_is_missing_is_named(undecided, monkeypatch, missing):
    if missing == "the core":
        core = SimpleNamespace(loaded=False, reason="no compiler")
        monkeypatch.setattr(register, "native_core", lambda: core)
        text = "the native core, which launches them, is not loaded: no compiler"
    else:
        undecided.major, text = 7, r"a GPU has compute capability \(7, 0\); the CUDA kernels need 7.5"
    with pytest.warns(RuntimeWarning, match=text):
        assert not cuda_core(0).loaded


@pytest.mark.usefixtures("undecided")
def test_native_code_turned_off_is_silent(monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    reason = "AMP_PLUGIN_NATIVE=0 turns native code off; unset it"
    assert cuda_core() == CudaCore(loaded=False, reason=reason)


@pytest.mark.usefixtures("undecided")
def test_a_device_is_opened_once(monkeypatch):
    opened = []
    monkeypatch.setattr(
        register, "_open", lambda index: opened.append(index) or CudaCore(loaded=True, reason="")
    )
    for _ in range(2):
        assert torch.ops.amp_plugin._cuda_prepare(0)
    assert opened == [0]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("name", OPCHECKS)
def test_the_kernels_write_what_the_schemas_say(name):
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), OPCHECKS[name])
    torch.library.opcheck(getattr(torch.ops.amp_plugin, name).default, given, test_utils=("test_schema",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_a_machine_without_cuda_says_so():
    core = cuda_core()
    assert not core.loaded
    assert "CUDA" in core.reason


def test_defining_the_ops_neither_starts_cuda_nor_loads_the_compiler():
    code = (
        "import sys, torch, amp_plugin.kernels.ops; "
        "print(torch.cuda.is_initialized(), {'amp_plugin.kernels.cuda.compile', 'cuda.core'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True) == "False set()\n"


class CallsInside(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with outside_tracers():
            return func(*args, **(kwargs or {}))


def test_a_block_that_no_tracer_sees_runs_inside_a_mode_too():
    """A process may meet its first region or GPU op in a mode.

    torch refuses to change a tracer's state there.
    """
    with CallsInside():
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
