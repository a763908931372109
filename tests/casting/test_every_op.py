"""Every op in torch's test database gives the same as under torch.autocast: bits, or dtypes on fake tensors."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import amp_plugin
from tests.torchs_own import torchs_own

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    # warnings of the database itself: sparse samples, deprecated operators
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = 3
LOWER = {"cpu": torch.bfloat16, "cuda": torch.float16}
WITHOUT_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
ROUNDED_BY_ADDRESS = {"linalg.lstsq"}  # LAPACK: two runs of torch.autocast also differ by 1e-6
# The error of torch 2.13 (on all devices but CUDA) if a promoted op gets the other 16-bit type. Our kernels
# compute it.
DEFECT = "Unexpected floating ScalarType in at::autocast::prioritize"


def samples_of(info, dtype, requires_grad=False):
    # not info.sample_inputs(): it inspects the whole stack on each call, which is slow under pytest
    return info.sample_inputs_func(info, "cpu", dtype, requires_grad)


def outcome(autocast, device, op, sample):
    """Return the error, or the dtypes and values of all outputs and gradients."""
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


def depends_on_order(device, op, sample):
    """Return whether torch says that the op, or its backward, adds in an order that changes from run to run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        refused = outcome(torch.autocast, device, op, sample)
    finally:
        torch.use_deterministic_algorithms(before)
    return isinstance(refused, str) and "does not have a deterministic implementation" in refused


def same_but_for_order(one, other):
    """Return whether two results differ only as much as sums of a few terms in another order do."""
    if isinstance(one, str) or isinstance(other, str) or len(one) != len(other):
        return False
    if any(isinstance(value, str) for value in (*one, *other)):
        return False
    for a, b in zip(one, other, strict=True):
        if a is None or b is None or a.dtype != b.dtype or not a.is_floating_point():
            if not same([a], [b]):
                return False
            continue
        largest = plain(b).abs().max() if b.numel() else 0.0
        if (
            a.shape != b.shape
            or (plain(a) - plain(b)).abs().gt(16 * torch.finfo(b.dtype).eps * largest).any()
        ):
            return False
    return True


def test_an_order_of_additions_is_an_excuse_only_where_torch_says_so():
    """grid_sample's backward adds with atomics on a GPU.

    On the CPU, ``put_`` without ``accumulate`` is a case like that.
    """

    def put(x, values):
        return x.clone().put_(torch.tensor([0, 0]), values)

    sample = SimpleNamespace(input=torch.ones(3), args=(torch.ones(2),), kwargs={})
    assert depends_on_order("cpu", put, sample)
    assert not depends_on_order(
        "cpu", torch.add, SimpleNamespace(input=torch.ones(3), args=(1.0,), kwargs={})
    )
    ones = torch.ones(4, dtype=torch.float16)
    assert same_but_for_order([ones, None], [ones * (1 + 2**-9), None])
    assert not same_but_for_order([ones], [ones * (1 + 2**-5)])
    assert not same_but_for_order([ones], [ones.float()])
    assert not same_but_for_order([ones], ["an error"])


def test_the_order_of_additions_changes_the_gradient_of_grid_sample():
    """The terms that a GPU adds with atomics are added one by one here: forwards, backwards and shuffled."""
    (info,) = (
        info for info in torchs_own("common_methods_invocations").op_db if info.name == "grid_sampler_2d"
    )
    for sample in itertools.islice(samples_of(info, torch.float16), SAMPLES):
        image = sample.input.float().requires_grad_()
        pixels = info.op(image, *(a.float() if isinstance(a, torch.Tensor) else a for a in sample.args))
        terms = [
            torch.autograd.grad(pixels[batch, :, row, column].sum(), image, retain_graph=True)[0].half()
            for batch, row, column in itertools.product(*map(range, (pixels.shape[0], *pixels.shape[2:])))
        ]
        orders = [terms, terms[::-1], [terms[i] for i in torch.randperm(len(terms)).tolist()]]
        first, *others = [functools.reduce(torch.add, order) for order in orders]
        assert not all(torch.equal(first, other) for other in others), "an excuse must have a reason"
        assert all(same_but_for_order([first], [other]) for other in others)


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
            if same(theirs, ours) or not same(theirs, outcome(torch.autocast, device, info.op, sample)):
                continue
            if depends_on_order(device, info.op, sample) and same_but_for_order(ours, theirs):
                continue
            different.append((info.full_name, str(sample)[:200]))
    assert different == []
    assert compared > 1000
    assert dtype is torch.float16 or not defects


def fake_dtypes(autocast, device, mode, op, sample):
    """Return the error, or the dtypes of the outputs, on a device that need not exist."""

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
