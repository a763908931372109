"""Every case of torch's own autocast tests, on the CPU for real and on CUDA with fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_plugin
from amp_plugin.casting.dispatcher import KERNELS
from tests.torchs_own import torchs_own

LISTS = torchs_own("autocast_test_lists")

# list name -> (module that holds the function, what it is run as, expected dtype or None: written in the case)
CPU_LISTS = {
    "torch_16": (torch, "lower"),
    "nn_16": (torch._C._nn, "lower"),
    "torch_fp32": (torch, torch.float32),
    "nn_fp32": (torch._C._nn, torch.float32),
    "torch_need_autocast_promote": (torch, torch.float32),
    "torch_expect_builtin_promote": (torch, "builtin"),
    "methods_expect_builtin_promote": (None, "builtin"),
}
CUDA_LISTS = {
    "torch_fp16": (torch, "lower"),
    "nn_fp16": (torch._C._nn, "lower"),
    "linalg_fp16": (torch._C._linalg, "lower"),
    "methods_fp16": (None, "lower"),
    "torch_fp32": (torch, torch.float32),
    "nn_fp32": (torch._C._nn, torch.float32),
    "methods_fp32": (None, torch.float32),
    "torch_need_autocast_promote": (torch, torch.float32),
    "torch_expect_builtin_promote": (torch, "builtin"),
    "methods_expect_builtin_promote": (None, "builtin"),
}


def cases(lists, names):
    return list(_cases(lists, names))


def _cases(lists, names):
    for list_name, (module, kind) in names.items():
        for number, case in enumerate(getattr(lists, list_name)):
            yield pytest.param(list_name, number, module, kind, id=f"{list_name}-{number}-{case[0]}")


def unpack(case):
    """Split a case in op, arguments, keyword arguments and expected dtype."""
    op, args, *rest = case
    if isinstance(args, str):  # einsum keeps its equation apart
        args, rest = (args, *rest[0]), rest[1:]
    kwargs = next((value for value in rest if isinstance(value, dict)), {})
    expected = next((value for value in rest if isinstance(value, torch.dtype)), None)
    return op, args, kwargs, expected


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return type(value)(cast(element, dtype) for element in value)
    return value


def functions(module, op, args):
    """The function and the method of that name, as far as they exist."""
    if module is not None and hasattr(module, op):
        yield getattr(module, op)
    if isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, op):
        yield getattr(torch.Tensor, op)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for element in value for tensor in tensors(element)]
    return []


torch.manual_seed(0)
CPU_CASES = LISTS.AutocastCPUTestLists("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("list_name", "number", "module", "kind"), cases(CPU_CASES, CPU_LISTS))
def test_cpu_case(list_name, number, module, kind, dtype):
    op, args, kwargs, expected = unpack(getattr(CPU_CASES, list_name)[number])
    if kind == "lower":
        args = cast(args, torch.float32)
    if list_name == "torch_need_autocast_promote" and dtype is torch.float16:
        args = [
            [t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype is torch.bfloat16 else t for t in a]
            if isinstance(a, (list, tuple))
            else (a.to(dtype) if isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 else a)
            for a in args
        ]
    run_as = dtype if kind == "lower" else kind
    called = list(functions(module, op, args))
    assert called
    for function in called:
        torch.manual_seed(1)
        with amp_plugin.autocast("cpu", dtype=dtype):
            output = tensors(function(*args, **kwargs))
        with torch.autocast("cpu", dtype=dtype):
            torch.manual_seed(1)
            theirs = tensors(function(*args, **kwargs))
        assert [t.dtype for t in output] == [t.dtype for t in theirs]
        for ours, other in zip(output, theirs, strict=True):
            assert torch.equal(ours, other) or (torch.isnan(ours) == torch.isnan(other)).all()
        if kind == "builtin":
            continue
        torch.manual_seed(1)
        control = tensors(function(*cast(tuple(args), run_as), **kwargs))
        for ours, other in zip(output, control, strict=True):
            assert ours.dtype == (expected or other.dtype)
            assert torch.equal(ours, other.to(ours.dtype)) or torch.isnan(ours).any()


# Cases that cannot run on fake CUDA tensors, each with its error.
CANNOT_RUN_FAKE = {
    # the case's equation does not fit its matrices; torch's test skips it (test_einsum below has one that fits)
    "torch_fp16-17-einsum": "does not match the number of dimensions",
    "torch_expect_builtin_promote-10-equal": "aten.equal.default",
}
if not torch.backends.cuda.is_built():
    CANNOT_RUN_FAKE |= {
        "torch_fp16-10-cudnn_convolution": "Torch not compiled with CUDA enabled",
        "torch_fp16-11-cudnn_convolution_transpose": "Torch not compiled with CUDA enabled",
        "torch_fp16-25-gru_cell": "Torch not compiled with CUDA enabled",
        "torch_need_autocast_promote-7-grid_sampler": "PyTorch is not linked with support for cuda devices",
    }
elif not torch.cuda.is_available():
    needs_driver = ["10-cudnn_convolution", "11-cudnn_convolution_transpose"]
    if torch.__version__ < "2.13":
        needs_driver += ["0-_convolution", "1-_convolution", "25-gru_cell"]
    CANNOT_RUN_FAKE |= {f"torch_fp16-{name}": "Found no NVIDIA driver" for name in needs_driver}
# cross without dim, chain_matmul
DEPRECATED = pytest.mark.filterwarnings("ignore:Using torch.cross", "ignore:torch.chain_matmul")


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


@pytest.fixture(scope="module")
def fake_cuda():
    mode = FakeTensorMode()
    with mode:
        lists = LISTS.AutocastTestLists("cuda")
    return mode, lists


def outcome(mode, lists, list_name, number, module, *, native, dtype=torch.float16):
    """Dtypes that come out of each function of a case, or the error's type and first line."""
    op, args, kwargs, _ = unpack(getattr(lists, list_name)[number])
    seen = []
    for function in functions(module, op, args):
        with mode, cuda_autocast(dtype, native=native):
            try:
                seen.append([t.dtype for t in tensors(function(*args, **kwargs))])
            except Exception as error:  # noqa: BLE001 - the error is what is compared
                seen.append((type(error).__name__, str(error).splitlines()[0]))
    return seen


@DEPRECATED
@pytest.mark.native
@pytest.mark.parametrize(
    ("list_name", "number", "module", "kind"),
    cases(LISTS.AutocastTestLists("cpu"), CUDA_LISTS),
)
def test_cuda_case_with_fake_tensors(fake_cuda, list_name, number, module, kind):
    mode, lists = fake_cuda
    ours = outcome(mode, lists, list_name, number, module, native=True)
    op, *_ = unpack(getattr(lists, list_name)[number])
    name = f"{list_name}-{number}-{op}"
    failed = [dtypes for dtypes in ours if isinstance(dtypes, tuple)]
    if name in CANNOT_RUN_FAKE:
        if torch.cuda.is_available():
            pytest.skip("fakes ask the device there is; test_cuda_regions.py runs the case on it")
        assert failed, f"{name} runs on fake tensors now: take it out of CANNOT_RUN_FAKE"
        assert CANNOT_RUN_FAKE[name] in failed[0][1]
        return
    assert not failed
    assert ours == outcome(mode, lists, list_name, number, module, native=False)
    _, _, _, expected = unpack(getattr(lists, list_name)[number])
    if kind != "builtin":
        wanted = expected or (torch.float16 if kind == "lower" else kind)
        assert all(dtype is wanted for dtypes in ours for dtype in dtypes)


@pytest.mark.native
def test_einsum(fake_cuda):
    mode, _ = fake_cuda
    with mode, cuda_autocast(torch.bfloat16, native=True):
        x = torch.randn(2, 3, 4, 5, device="cuda")
        assert torch.einsum("bkhd,bqhd->bqkh", x, x).dtype is torch.bfloat16


def test_few_cases_cannot_run_fake():
    assert len(CANNOT_RUN_FAKE) <= 10


def test_binary_cross_entropy_is_banned_with_torchs_text(fake_cuda):
    mode, _ = fake_cuda
    with mode:
        x = torch.rand(3, device="cuda")
        texts = []
        for native in (True, False):
            with cuda_autocast(torch.float16, native=native):
                with pytest.raises(RuntimeError, match="are unsafe to autocast") as error:
                    torch.nn.functional.binary_cross_entropy(x, x)
                texts.append(str(error.value))
    assert texts[0] == texts[1]
