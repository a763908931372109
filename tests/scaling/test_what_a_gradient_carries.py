"""Each row of the ledger's table, on the native core and on the fallback, compared with torch.amp.

The gradient of ``loss(g)`` is ``g``. A row gives the value of ``.grad`` after its event, and the result of
the step that follows. Rows in which torch.amp is wrong are marked.
"""

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.kernels.build import native_core
from amp_plugin.options import LossScaleOptions
from amp_plugin.scaling.ledger import GradientLedger, make_ledger
from amp_plugin.scaling.loss_scale import LossScale

SCALE = 8.0


@pytest.fixture(params=["native", "python"])
def ledger_of(request, monkeypatch):
    """Return a function that makes ledgers of one kind. Scalers then use the same kind."""
    if request.param == "native" and native_core().extension is None:
        pytest.skip(native_core().reason)
    if request.param == "python":
        monkeypatch.setattr("amp_plugin.scaling.optimizer_state.make_ledger", GradientLedger)
    return GradientLedger if request.param == "python" else make_ledger


def scale():
    return LossScale(LossScaleOptions())


def some_params(count=3):
    return [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]


def carried(ledger):
    """Return the scale that each parameter's gradient carries, in order."""
    by_param = {id(param): scale for scale, params, _ in ledger.parts() for param in params}
    return [by_param[id(param)] for param in ledger.params]


# -- the table, row by row -----------------------------------------------------------------------


class Pair:
    """Our scaler and torch's, each with one parameter and SGD with a learning rate of 1."""

    def __init__(self, **options):
        self.sides = []
        for kind in (GradScaler, torch.amp.GradScaler):
            param = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([param], lr=1.0)
            self.sides.append((kind("cpu", init_scale=SCALE, growth_interval=1, **options), param, optimizer))
        self.ours = self.sides[0][0]
        self.ours.register(self.sides[0][2])

    def backward(self, gradient=3.0):
        for scaler, param, _ in self.sides:
            scaler.scale((param * gradient).sum()).backward()

    def call(self, name):
        for scaler, _, optimizer in self.sides:
            getattr(scaler, name)(optimizer)

    def update(self):
        for scaler, _, _ in self.sides:
            scaler.update()

    def grads(self):
        return [param.grad.item() for _, param, _ in self.sides]

    def values(self):
        return [param.item() for _, param, _ in self.sides]


def test_row_1_a_backward_pass_brings_what_carries_nothing_to_its_scale(ledger_of):
    pair = Pair()
    pair.backward(3.0)
    pair.call("unscale_")
    # ours first multiplies the unscaled 3 by 8, and unscales again after the backward pass
    pair.backward(4.0)
    ours, theirs = pair.grads()
    assert (ours, theirs) == (7.0, 3.0 + 4.0 * SCALE)
    pair.call("step")
    assert pair.values() == [-7.0, -(3.0 + 4.0 * SCALE)]


def test_row_1_a_second_scale_takes_over_the_gradients_of_the_first(ledger_of):
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cpu", init_scale=8.0, losses=("b",))
    scaler.register(optimizer)
    scaler.scale((param * 3.0).sum()).backward()
    scaler.update(2.0)  # only scales that were used change: "b" keeps 8
    assert param.grad.item() == 6.0
    scaler.scale((param * 4.0).sum(), name="b").backward()
    assert param.grad.item() == (3.0 + 4.0) * 8.0
    scaler.step(optimizer)
    assert param.item() == -7.0


@pytest.mark.parametrize("use", ["unscale_", "step"])
def test_rows_2_and_3_a_use_divides_once(ledger_of, use):
    pair = Pair()
    pair.backward(3.0)
    assert pair.grads() == [3.0 * SCALE] * 2
    pair.call(use)
    assert pair.grads() == [3.0] * 2
    if use == "unscale_":
        pair.call("step")
    assert (pair.grads(), pair.values()) == ([3.0] * 2, [-3.0] * 2)


def test_row_4_an_update_rescales_what_was_not_used(ledger_of):
    """torch.amp divides by the new scale, although the gradients were made with the old one."""
    pair = Pair()
    pair.backward(3.0)
    for scaler, _, _ in pair.sides:  # another optimizer's step raises the scale
        other = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([other], lr=1.0)
        scaler.scale(other.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    pair.ours.end_iteration()
    assert [scaler.get_scale() for scaler, _, _ in pair.sides] == [2 * SCALE] * 2
    assert pair.grads() == [3.0 * 2 * SCALE, 3.0 * SCALE]
    pair.call("step")
    assert pair.values() == [-3.0, -1.5]


def test_row_5_after_a_step_and_an_update_a_gradient_is_scaled_again(ledger_of):
    """This holds whoever wrote the gradient, and whether or not the write was noticed, as in torch.amp."""
    pair = Pair()
    pair.backward(3.0)
    pair.call("step")
    pair.update()
    for scaler, param, _ in pair.sides:
        param.grad.data.fill_(5.0 * scaler.get_scale())  # changes no version counter
    pair.call("step")
    assert pair.values() == [-8.0, -8.0]


# -- the ledger without a scaler -------------------------------------------------------------------


def test_events_change_what_gradients_carry(ledger_of):
    params, first, second = some_params(), scale(), scale()
    ledger = ledger_of(params, (), None)
    assert (carried(ledger), ledger.has_gradients(), ledger.waits()) == ([None] * 3, False, False)
    ledger.begin_backward(first)
    assert carried(ledger) == [first] * 3
    params[1].grad = torch.ones(4)
    assert (ledger.has_gradients(), ledger.waits(), ledger.has_grown()) == (True, True, True)
    ledger.begin_backward(second)
    assert (carried(ledger), ledger.waits()) == ([second] * 3, True), "the first pass had added"
    ledger.carry_nothing(1, 0, True)
    assert (carried(ledger), ledger.waits(), ledger.has_grown()) == ([None] * 3, False, False)
    assert not ledger.assume_scaled(first, 1, 0), "no update has been requested since"
    assert not ledger.assume_scaled(first, 2, 1), "another optimizer has not used them"
    assert ledger.assume_scaled(first, 1, 1)
    assert carried(ledger) == [first] * 3


def test_what_was_only_unscaled_is_scaled_again_if_it_is_in_other_memory(ledger_of):
    params = some_params(2)
    ledger = ledger_of(params, (), None)
    for param in params:
        param.grad = torch.ones(4)
    ledger.carry_nothing(1, 0, False)
    params[0].grad.mul_(2)
    params[1].grad = torch.ones(4)
    assert ledger.assume_scaled(one := scale(), 1, 1)
    assert carried(ledger) == [None, one]


def test_optimizers_that_share_a_parameter_share_its_record(ledger_of):
    params, one = some_params(), scale()
    first = ledger_of(params[:2], (), one)
    params[1].grad = torch.ones(4)
    second = ledger_of(params[1:], [first], None)
    assert (carried(first), carried(second)) == ([one, one], [one, None])
    second.carry_nothing(2, 0, True)
    assert carried(first) == [one, None]
    assert [[id(p) for p in members] for _, members, _ in first.parts()] == [[id(params[0])], [id(params[1])]]


def test_a_ledger_tells_a_user_who_writes_from_its_own_writing(ledger_of):
    params = some_params(2)
    for param in params:
        param.grad = torch.ones(4)
    ledger = ledger_of(params, (), None)
    assert ledger.is_changed(), "never looked at"
    ledger.look_again()
    assert not ledger.is_changed()
    params[0].grad.mul_(2)
    ledger.write(lambda: [param.grad.mul_(3) for param in params])
    assert [changed for _, _, changed in ledger.parts()] == [True]
    params[0].grad = None
    assert ledger.is_changed(), "dropped"
    ledger.look_again()
    ledger.write(lambda: params[1].grad.mul_(3))
    assert not ledger.is_changed()


@pytest.mark.parametrize("count", [15, 16, 17, 33])
def test_every_gradient_of_many_is_looked_at(ledger_of, count):
    """The native ledger follows pointers in blocks of 16 parameters."""
    params = some_params(count)
    for param in params:
        param.grad = torch.ones(4)
    ledger = ledger_of(params, (), None)
    for param in params:
        ledger.look_again()
        param.grad.add_(1)
        assert ledger.is_changed()
        ledger.look_again()
        param.grad = torch.ones(4)
        assert ledger.is_changed()


def test_a_new_gradient_at_an_old_address_is_new_and_none_is_kept_alive(ledger_of):
    """A gradient in reused memory looks the same as the old one, except for the identity of its storage."""
    params = some_params(1)
    ledger = ledger_of(params, (), None)
    for _ in range(20):
        params[0].grad = torch.ones(4)
        reference = torch._C._WeakTensorRef(params[0].grad)
        assert ledger.is_changed()
        ledger.look_again()
        params[0].grad = None
        assert reference.expired()


def test_a_ledger_lets_tensors_be_swapped(ledger_of):
    params = some_params(1)
    params[0].grad = torch.ones(4)
    ledger = ledger_of(params, (), None)
    ledger.look_again()
    torch.utils.swap_tensors(params[0], torch.nn.Parameter(torch.zeros(4)))
    assert ledger.is_changed()


def test_inference_tensors_have_no_version(ledger_of):
    with torch.inference_mode():
        param = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        param.grad = torch.ones(2)
    ledger = ledger_of([param], (), None)
    ledger.look_again()
    assert not ledger.is_changed()
