"""Gradients of every kind are found, and seen again for what they are."""

import math
from unittest.mock import MagicMock

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.kernels.build import native_core
from amp_plugin.scaling.gradients import GradientLedger, batch_gradients, make_ledger


@pytest.fixture(params=["native", "python"])
def ledger_of(request):
    if request.param == "python":
        return GradientLedger
    if native_core().extension is None:
        pytest.skip(native_core().reason)
    return make_ledger


def some_params(count=3):
    return [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]


def test_a_ledger_sees_writes_and_replacements(ledger_of):
    params = some_params()
    ledger = ledger_of()
    assert (ledger.count(params), ledger.compare(params, 1)) == (0, 0)
    params[1].grad = torch.ones(4)
    assert (ledger.count(params), ledger.compare(params, 1)) == (1, 2), "never remembered: new"
    ledger.remember(params, 1)
    assert ledger.compare(params, 1) == 0
    params[1].grad.mul_(2)
    assert ledger.compare(params, 1) == 1
    assert ledger.compare(params, 2) == 2, "slots know nothing of each other"
    params[2].grad = torch.ones(4)
    assert ledger.compare(params, 1) == 2
    ledger.remember(params, 1)
    params[1].grad = None
    assert ledger.compare(params, 1) == -1, "one is gone, the other has not changed"
    params[2].grad.mul_(2)
    assert ledger.compare(params, 1) == 1, "a write counts more"
    assert ledger.split([2]).compare(params[2:], 1) == 1, "a part knows what the whole knew"


@pytest.mark.parametrize("count", [15, 16, 17, 33])
def test_every_gradient_of_many_is_looked_at(ledger_of, count):
    """The native ledger follows pointers in blocks of 16."""
    params = some_params(count)
    for param in params:
        param.grad = torch.ones(4)
    ledger = ledger_of()
    ledger.remember(params, 1)
    for i, param in enumerate(params):
        param.grad.add_(1)
        assert ledger.compare(params, 1) == 1
        param.grad = torch.ones(4)
        assert ledger.compare(params, 1) == 2
        param.grad = None
        assert (ledger.count(params), ledger.compare(params, 1)) == (count - 1, -1)
        params[i] = torch.nn.Parameter(torch.ones(4).half())
        params[i].grad = torch.ones(4).half()
        assert ledger.first_float16(params) == i
        params[i] = param
        param.grad = torch.ones(4)
        ledger.remember(params, 1)
        assert (ledger.first_float16(params), ledger.compare(params, 1)) == (-1, 0)


def test_gradients_of_views_and_of_tensors_autograd_never_saw(ledger_of):
    views = [row.requires_grad_() for row in torch.zeros(3, 4).unbind()]
    views[1].grad = torch.ones(4)
    plain = torch.zeros(4)
    assert ledger_of().count([plain, *views, plain]) == 1
    plain.grad = torch.ones(4)
    assert ledger_of().count([plain, *views, plain]) == 3


def test_a_new_gradient_at_an_old_address_is_new_and_none_is_kept_alive(ledger_of):
    """What an allocator gives back looks the same in all but identity."""
    params, ledger = some_params(1), ledger_of()
    for _ in range(20):
        params[0].grad = torch.ones(4)
        reference = torch._C._WeakTensorRef(params[0].grad)
        assert ledger.compare(params, 1) == 2
        ledger.remember(params, 1)
        params[0].grad = None
        assert reference.expired()


def test_inference_tensors_have_no_version(ledger_of):
    with torch.inference_mode():
        param = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        param.grad = torch.ones(2)
    ledger = ledger_of()
    ledger.remember([param], 1)
    assert ledger.compare([param], 1) == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, with or without
def test_batches_by_device_and_kind():
    params = some_params(6)
    params[0].grad = torch.ones(4)
    params[2].grad = torch.ones(4).to_sparse()
    params[3].grad = torch.ones(4)
    params[4].grad = torch.sparse_coo_tensor([[0, 0]], [3.0, 4.0], (4,), check_invariants=True)
    batches = batch_gradients(params)
    assert [batch.positions for batch in batches] == [[0, 2, 3], [4]]
    measured = [batch.measure(torch.tensor(0.5), 2.0, write=False) for batch in batches]
    assert [found.norm.item() for found in measured] == [pytest.approx(math.sqrt(12) / 2), 3.5]
    assert [(found.found_inf.item(), found.flags.tolist()) for found in measured] == [(0, [0] * 3), (0, [0])]
    assert params[4].grad._values().tolist() == [3.0, 4.0]


def train(param, gradient, **options):
    """Set a scaled gradient by hand and step once with SGD."""
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0, **options)
    scaler.scale(torch.ones(()))
    param.grad = gradient
    scaler.step(optimizer)
    return scaler.last_step(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")  # torch says it once
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
    """float16 ones are added up scaled, as torch.amp does; others are unscaled first."""
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
    """A subclass of tensors."""


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
    """The native ledger follows pointers, and what is no tensor has none."""
    if native_core().extension is None:
        pytest.skip(native_core().reason)
    params, ledger = some_params(41), make_ledger()
    params[position] = given
    calls = [ledger.count, ledger.survey, ledger.survey_shards, ledger.first_float16, ledger.hooked]
    calls += [lambda params: ledger.remember(params, 1), lambda params: ledger.compare(params, 1)]
    calls += [lambda params: ledger.multiply_(params, torch.ones(()))]
    for call in calls:
        with pytest.raises(TypeError, match="expected a list of tensors, got one with"):
            call(params)
