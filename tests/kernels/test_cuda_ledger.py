"""If no gradient has moved, kernels are launched without the dispatcher.

Any change of a gradient is noticed.
"""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from amp_plugin.kernels import ops  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.build import native_core
from tests.scaling.ops_seen import OpsSeen

amp = torch.ops.amp_plugin
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def parameters(count=9, size=8):
    """Return parameters of several dtypes. Some have no gradient, and one has an empty gradient."""
    params = [torch.nn.Parameter(torch.zeros(size, device="cuda", dtype=DTYPES[i % 4])) for i in range(count)]
    for i, param in enumerate(params):
        if i % 3 != 2:
            param.grad = torch.full_like(param, i + 1.0)
    params.append(torch.nn.Parameter(torch.zeros(0, device="cuda")))
    params[-1].grad = torch.zeros(0, device="cuda")
    return params


def scalar(value):
    return torch.tensor(value, device="cuda")


def values(result):
    return [value.tolist() for value in result]


def by_the_op(params, inverse, p=2.0):
    return values(amp.norm_check([param.grad for param in params if param.grad is not None], inverse, p))


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, 3.0])
def test_a_ledger_measures_as_the_op_does_moved_or_not(p):
    params, inverse, ledger = parameters(), scalar(0.5), native_core().extension.GradientLedger
    for bad in (1.0, math.nan, math.inf, 2.0):
        params[3].grad[5] = bad
        for _ in range(2):
            right = str(by_the_op(params, inverse, p))
            assert str(values(ledger.norm_check(params, inverse, p))) == right
            assert str(values(ledger.norm_check(params, scalar(2.0), p, True))) == right
    params[3].grad = params[3].grad.clone()
    params[4].grad = None
    for _ in range(2):
        assert values(ledger.norm_check(params, inverse, p)) == by_the_op(params, inverse, p)


def test_what_a_ledger_writes_is_written_once_and_counted():
    params, ledger = parameters(), native_core().extension.GradientLedger
    grads = [param.grad for param in params if param.grad is not None]
    ledger.norm_check(params, scalar(1.0), 2.0)
    before, versions = [grad.double().tolist() for grad in grads], [grad._version for grad in grads]
    norm, found, flags = ledger.unscale_(params, scalar(2.0), 2.0, True)  # a scale instead of its inverse
    assert ledger.multiply_(params, scalar(8.0)).item() == 0
    assert [grad.double().tolist() for grad in grads] == [[4 * x for x in grad] for grad in before]
    assert [grad._version for grad in grads] == [version + 2 for version in versions]
    assert norm.item() == pytest.approx(0.5 * math.hypot(*(x for grad in before for x in grad)))
    assert (found.item(), flags.tolist()) == (0, [0] * len(grads))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
def test_each_gradient_of_each_block_is_compared(count):
    """Gradients are looked up in blocks of 16."""
    params = [torch.nn.Parameter(torch.zeros(4, device="cuda")) for _ in range(count)]
    for param in params:
        param.grad = torch.full((4,), 0.5, device="cuda")
    ledger, inverse, squares = native_core().extension.GradientLedger, scalar(1.0), count
    for param in params:
        param.grad, squares = torch.full((4,), 1.5, device="cuda"), squares + 8
        for _ in range(2):
            assert ledger.norm_check(params, inverse, 2.0)[0].item() == pytest.approx(math.sqrt(squares))
    versions = [param.grad._version for param in params]
    ledger.multiply_(params, scalar(2.0))
    assert [param.grad._version for param in params] == [version + 1 for version in versions]
    for param in params[::-1]:
        param.grad, squares = None, squares - 9
        assert ledger.norm_check(params, inverse, 2.0)[0].item() == pytest.approx(2 * math.sqrt(squares))


CHANGES = {
    "another dtype": lambda grad: grad.view(torch.bfloat16),  # as many bytes, at the same address
    "with gaps": lambda grad: grad[:7:2],
    "shorter": lambda grad: grad[:4],
    "further on": lambda grad: grad[4:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_lies_in_the_same_memory_otherwise_is_seen(change):
    held, ledger = torch.arange(1.0, 9.0, device="cuda").half(), native_core().extension.GradientLedger
    params = [torch.nn.Parameter(torch.zeros(4, device="cuda")) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    for grad in (held[:4] if change in {"with gaps", "further on"} else held, CHANGES[change](held)):
        params[1] = torch.nn.Parameter(torch.zeros_like(grad))
        params[1].grad = grad
        norm = ledger.norm_check(params, scalar(1.0), 2.0)[0].item()
        assert norm == pytest.approx(math.sqrt(12 + grad.double().square().sum().item()), rel=1e-3)


def test_a_gradient_on_another_device_is_refused():
    params, inverse, ledger = parameters(), scalar(1.0), native_core().extension.GradientLedger
    ledger.norm_check(params, inverse, 2.0)
    params[1] = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(ValueError, match="tensor 1 of 7 is not on cuda:0, where the scale is"):
        ledger.norm_check(params, inverse, 2.0)


def test_modes_and_profilers_still_see_the_ops():
    params, inverse, ledger = parameters(), scalar(1.0), native_core().extension.GradientLedger
    ledger.norm_check(params, inverse, 2.0)
    with OpsSeen() as seen:
        ledger.norm_check(params, inverse, 2.0)
        ledger.unscale_(params, inverse, 2.0)
        ledger.multiply_(params, inverse)
    assert seen.names == ["norm_check", "unscale_", "multiply_"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ledger.norm_check(params, inverse, 2.0)
    assert "amp_plugin::norm_check" in {event.key for event in profiler.key_averages()}
