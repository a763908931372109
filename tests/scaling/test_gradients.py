"""Gradients of every kind are found, and are recognized the next time."""

import math
from unittest.mock import MagicMock

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.gradients import batch_gradients


def some_params(count=3):
    return [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]


# torch 2.11 warns whether the checks are on or off
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_by_device_and_kind():
    params = some_params(6)
    params[0].grad = torch.ones(4)
    params[2].grad = torch.ones(4).to_sparse()
    params[3].grad = torch.ones(4)
    params[4].grad = torch.sparse_coo_tensor([[0, 0]], [3.0, 4.0], (4,), check_invariants=True)
    batches = batch_gradients(params)
    assert [batch.params for batch in batches] == [[params[0], params[2], params[3]], [params[4]]]
    measured = [batch.run("norm_check", torch.tensor(0.5), 2.0, False) for batch in batches]
    assert [norm.item() for norm, _, _ in measured] == [pytest.approx(math.sqrt(12) / 2), 3.5]
    assert [(found.item(), flags.tolist()) for _, found, flags in measured] == [(0, [0] * 3), (0, [0])]
    assert params[4].grad._values().tolist() == [3.0, 4.0]


def train(param, gradient, **options):
    """Set a scaled gradient by hand, and take one step with SGD."""
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, **options)
    scaler.scale(torch.ones(()))
    param.grad = gradient
    scaler.step(optimizer)
    return scaler.last_step(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")  # torch warns only once
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed(layout):
    param = torch.nn.Parameter(torch.eye(4).to_sparse(layout=layout))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = (torch.eye(4) * 16.0).to_sparse(layout=layout)
    assert scaler.clip_grad_norm_(optimizer, 1e9).item() == 4.0
    assert param.grad.values().tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_duplicates_that_overflow_together(dtype):
    """Float16 duplicates are added while they are scaled, as in torch.amp.

    Other dtypes are unscaled first.
    """
    param, most = torch.nn.Parameter(torch.zeros(4, dtype=dtype)), torch.finfo(dtype).max
    grad = torch.sparse_coo_tensor([[1, 1]], [most * 0.75] * 2, (4,), dtype=dtype, check_invariants=True)
    assert train(param, grad, fp16_gradients=True).skipped == (dtype is torch.float16)
    assert param[1].item() == pytest.approx(-most * 0.1875 * (dtype is torch.float32))


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_lazily_conjugated_and_negated(lazy):
    base = torch.randn(40, dtype=torch.complex64)
    grad = base.conj() if lazy == "conj" else base.conj().imag
    right = -grad.clone().resolve_conj().resolve_neg() / 8.0
    param = torch.nn.Parameter(torch.zeros(40, dtype=grad.dtype))
    train(param, grad)
    assert torch.equal(param.detach(), right)


@pytest.mark.native
def test_float8_is_refused():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float8_e5m2), requires_grad=False)
    with pytest.raises(TypeError, match="not supported; allowed are"):
        train(param, torch.full((4,), 16.0).to(torch.float8_e5m2))


class Tagged(torch.Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.complex64, torch.complex128, Tagged])
def test_other_dtypes_and_a_subclass_of_tensor(kind):
    dtype = torch.float32 if kind is Tagged else kind
    param, grad = torch.nn.Parameter(torch.zeros(5, dtype=dtype)), torch.full((5,), 24.0, dtype=dtype)
    train(param, grad.as_subclass(Tagged) if kind is Tagged else grad)
    assert torch.equal(param.detach(), torch.full((5,), -3.0, dtype=dtype))


@pytest.mark.parametrize(
    "given", [None, 1.0, object(), MagicMock(spec=torch.Tensor)], ids=["None", "1.0", "object", "mock"]
)
@pytest.mark.parametrize("position", [0, 15, 16, 40])
def test_a_list_that_holds_no_tensor_is_refused(given, position):
    """The native ledger follows pointers inside tensors. Other objects do not have them."""
    if native_core().extension is None:
        pytest.skip(native_core().reason)
    params, ledger = some_params(41), native_core().extension.GradientLedger
    params[position] = given
    calls = [ledger.survey, ledger.survey_shards, ledger.first_float16]
    calls += [lambda params: ledger(params, (), None).look_again()]
    calls += [lambda params: ledger(params, (), None).parts()]
    calls += [lambda params: ledger.multiply_(params, torch.ones(()))]
    for call in calls:
        with pytest.raises(TypeError, match="expected a list of tensors, found a"):
            call(params)
