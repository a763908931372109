"""The operators of torch's own test database beside torch.autocast: bit for bit, or by dtype on fake tensors."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import amp_plugin
from tests.torchs_own import torchs_own

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    # the database's own: sparse samples, deprecated operators
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = 3
LOWER = {"cpu": torch.bfloat16, "cuda": torch.float16}
WITHOUT_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
ROUNDED_BY_ADDRESS = {"linalg.lstsq"}  # LAPACK's: torch.autocast twice differs by 1e-6 too
# What torch 2.13 says, on all devices but CUDA, where a promoted op sees the other 16-bit type; ours computes it.
DEFECT = "Unexpected floating ScalarType in at::autocast::prioritize"


def samples_of(info, dtype, requires_grad=False):
    # info.sample_inputs() inspects the whole stack on every call, slow under pytest
    return info.sample_inputs_func(info, "cpu", dtype, requires_grad)


def outcome(autocast, device, op, sample):
    """Return the error, or dtype and values of all outputs and gradients."""
    torch.manual_seed(0)

    def fresh(leaf):
        is_tensor = isinstance(leaf, torch.Tensor)
        return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad) if is_tensor else leaf

    leaf, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    try:
        with autocast(device, dtype=LOWER[device]):
            outputs = [t for t in tree_leaves(op(leaf, *args, **kwargs)) if isinstance(t, torch.Tensor)]
        inputs = [
            t for t in tree_leaves((leaf, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        losses = [t.float().sum() for t in outputs if t.requires_grad and t.is_floating_point()]
        gradients = torch.autograd.grad(losses, inputs, allow_unused=True) if inputs and losses else ()
    except Exception as error:  # noqa: BLE001 - the error is what is compared
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [None if t is None else t.detach().cpu() for t in (*outputs, *gradients)]


def plain(tensor):
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    dense = dense.resolve_conj().resolve_neg()
    return (torch.view_as_real(dense) if dense.is_complex() else dense.double()).nan_to_num()


def same(one, other):
    if isinstance(one, str) or isinstance(other, str) or len(one) != len(other):
        return one == other
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and plain(a).equal(plain(b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_like_torch(device, dtype):
    op_db = torchs_own("common_methods_invocations").op_db
    compared, defects, different = 0, 0, []
    for info in op_db:
        if info.name in WITHOUT_VALUES | ROUNDED_BY_ADDRESS or dtype not in info.dtypes:
            continue
        samples = samples_of(info, dtype, info.supports_autograd)
        for sample in itertools.islice(samples, SAMPLES):
            theirs = outcome(torch.autocast, device, info.op, sample)
            ours = outcome(amp_plugin.autocast, device, info.op, sample)
            compared += 1
            if isinstance(theirs, str) and DEFECT in theirs:
                defects += 1
                if not isinstance(ours, str):
                    continue
            if not same(theirs, ours) and same(theirs, outcome(torch.autocast, device, info.op, sample)):
                different.append((info.full_name, str(sample)[:200]))
    assert different == []
    assert compared > 1000
    assert dtype is torch.float16 or not defects


def fake_dtypes(autocast, device, mode, op, sample):
    """Return the error, or the dtypes of the outputs on a device that need not be there."""

    def fake(leaf):
        is_strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        options = {"dtype": leaf.dtype, "device": device} if is_strided else {}
        return torch.empty_strided(leaf.shape, leaf.stride(), **options) if is_strided else leaf

    with mode:
        leaf, args, kwargs = tree_map(fake, (sample.input, sample.args, sample.kwargs))
        try:
            with autocast(device, dtype=torch.float16):
                outputs = tree_leaves(op(leaf, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the error is what is compared
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return [t.dtype for t in outputs if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    "device", ["cuda", *(pytest.param(device, marks=pytest.mark.whole_run) for device in ("xpu", "mps"))]
)
def test_like_torch_on(device):
    op_db = torchs_own("common_methods_invocations").op_db
    mode, compared, different = FakeTensorMode(), 0, []
    for info, dtype in itertools.product(op_db, (torch.float32, torch.bfloat16)):
        if dtype not in info.dtypes:
            continue
        sample = next(iter(samples_of(info, dtype)), None)
        if sample is not None:
            theirs, ours = (
                fake_dtypes(autocast, device, mode, info.op, sample)
                for autocast in (torch.autocast, amp_plugin.autocast)
            )
            compared += 1
            if theirs != ours and (DEFECT not in theirs or device == "cuda"):
                different.append((info.full_name, dtype, theirs, ours))
    assert different == []
    assert compared > 1000
