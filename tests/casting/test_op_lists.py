"""Every case of torch's own autocast tests comes out as under torch.autocast: on the CPU, on CUDA and with fakes of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_plugin
from amp_plugin.casting.dispatcher import KERNELS
from tests.torchs_own import torchs_own

LISTS = torchs_own("autocast_test_lists")
MODULES = {"nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
SHARED = ("torch_fp32", "nn_fp32", "torch_need_autocast_promote", "torch_expect_builtin_promote")
CPU_LISTS = ("torch_16", "nn_16", *SHARED, "methods_expect_builtin_promote")
CUDA_LISTS = ("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16", *SHARED, "methods_fp32")
CUDA_LISTS += ("methods_expect_builtin_promote",)
# What torch says where a promoted op sees the other 16-bit type; ours computes it.
DEFECT = "Unexpected floating ScalarType in at::autocast::prioritize"
# cross without dim, chain_matmul
pytestmark = pytest.mark.filterwarnings("ignore:Using torch.cross", "ignore:torch.chain_matmul")


def cases(lists, name):
    """Yield op, arguments and keyword arguments of each case; what is cast to 16 bits is given in float32."""
    for op, first, *others in getattr(lists, name):
        is_einsum = isinstance(first, str)  # which keeps its equation apart
        args, rest = ((first, *others[0]), others[1:]) if is_einsum else (first, others)
        kwargs = next((value for value in rest if isinstance(value, dict)), {})
        yield op, widened(args) if name.endswith("16") else args, kwargs


def widened(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return type(value)(widened(element) for element in value)
    return value


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for element in value for t in tensors(element)] if isinstance(value, (list, tuple)) else []


def outcomes(lists, name, region):
    """Return, for the function and the method of each case, the tensors that come out or the error."""
    module, seen = MODULES.get(name.split("_")[0], torch), []
    for op, args, kwargs in cases(lists, name):
        called = [getattr(module, op)] if module is not None and hasattr(module, op) else []
        if isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, op):
            called.append(getattr(torch.Tensor, op))
        assert called, op
        for function in called:
            torch.manual_seed(1)
            with region():
                try:
                    seen.append((op, tensors(function(*args, **kwargs))))
                except Exception as error:  # noqa: BLE001 - the error is what is compared
                    seen.append((op, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    return seen


def check_same(ours, theirs, *, not_run=0):
    """Check that outcomes are torch's, whatever its defect is the cause of apart."""
    failed = 0
    for (op, got), (_, expected) in zip(ours, theirs, strict=True):
        if isinstance(expected, str):
            assert got == expected or DEFECT in expected, op
            failed += DEFECT not in expected
            continue
        assert [t.dtype for t in got] == [t.dtype for t in expected], op
        for one, other in zip(got, expected, strict=True):
            is_fake = isinstance(one, torch._subclasses.FakeTensor)
            assert is_fake or torch.equal(one, other) or torch.isnan(one).any(), op
    assert failed <= not_run
    assert len(ours) > failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CPU_LISTS)
def test_cpu_cases(name, dtype):
    torch.manual_seed(0)
    lists = LISTS.AutocastCPUTestLists("cpu")
    ours, theirs = (
        outcomes(lists, name, partial(autocast, "cpu", dtype=dtype))
        for autocast in (amp_plugin.autocast, torch.autocast)
    )
    check_same(ours, theirs)


@contextmanager
def cuda_autocast(dtype, *, native):
    """Autocast's CUDA state without a CUDA device, where torch.autocast('cuda') turns itself off."""
    previous = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    KERNELS.install()
    amp_plugin.set_default_rules(amp_plugin.OpRules.default("cuda") if native else None)
    try:
        yield
    finally:
        amp_plugin.set_default_rules(None)
        torch.set_autocast_enabled("cuda", previous[0])
        torch.set_autocast_dtype("cuda", previous[1])
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@pytest.mark.native
@pytest.mark.parametrize("name", CUDA_LISTS)
def test_cuda_cases_with_fake_tensors(name):
    """What cannot run on fakes says so alike: cuDNN's ops and the GRU's cell, an equation that does not fit."""
    with FakeTensorMode():
        lists = LISTS.AutocastTestLists("cuda")
        ours, theirs = (
            outcomes(lists, name, partial(cuda_autocast, torch.float16, native=native))
            for native in (True, False)
        )
        check_same(ours, theirs, not_run=6)


def test_binary_cross_entropy_is_banned_with_torchs_text():
    texts = []
    with FakeTensorMode():
        x = torch.rand(3, device="cuda")
        for native in (True, False):
            with cuda_autocast(torch.float16, native=native):
                with pytest.raises(RuntimeError, match="are unsafe to autocast") as error:
                    torch.nn.functional.binary_cross_entropy(x, x)
                texts.append(str(error.value))
    assert texts[0] == texts[1]
