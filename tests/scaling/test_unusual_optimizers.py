"""Does the scaler step unusual optimizers as torch's does: grad_scaler arguments, mocks, nested ones?"""

import math
import warnings
from functools import partial
from unittest import mock

import pytest
import torch

from amp_plugin import GradScaler

KINDS = [torch.amp.GradScaler, GradScaler]


class Asking(torch.optim.SGD):
    """Follows torch's older contract: ``step(grad_scaler=)`` unscales and skips by itself."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self._step_supports_amp_scaling, self.told = True, []

    def step(self, closure=None, *, grad_scaler=None):
        self.told.append(isinstance(grad_scaler, torch.amp.GradScaler))
        stage = grad_scaler._per_optimizer_states[id(self)]["stage"].name
        found = grad_scaler._check_inf_per_device(self)
        self.told += [stage, sum(flag.item() for flag in found.values())]
        if not self.told[-1]:
            for param in self.param_groups[0]["params"]:
                with torch.no_grad():
                    divisor = grad_scaler._get_scale_async() if stage == "READY" else 1.0
                    param.sub_(0.5 * param.grad / divisor)
        return "stepped"


def trained(kind, *, unscales):
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, optimizer, seen = kind("cpu", init_scale=4.0, growth_interval=2), Asking([weight]), []
    for value in (1.0, 2.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.warns(FutureWarning, match="grad_scale"):
            seen.append(scaler.step(optimizer))
        scaler.update()
        seen.append((weight.tolist(), weight.grad.tolist(), scaler.get_scale(), *optimizer.told[-3:]))
    return seen


@pytest.mark.parametrize("unscales", [False, True])
def test_an_optimizer_that_wants_the_scaler_gets_it(unscales):
    theirs, ours = (trained(kind, unscales=unscales) for kind in KINDS)
    assert ours == theirs


def test_its_gradients_can_be_clipped_in_the_same_call():
    weight = torch.nn.Parameter(torch.ones(4))
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), Asking([weight])
    scaler.scale((weight * 3).sum()).backward()
    with pytest.warns(FutureWarning, match="grad_scale"):
        result = scaler.clip_and_step(optimizer, 1.0)
    assert (result.norm.item(), optimizer.told) == (6.0, [True, "UNSCALED", 0.0])
    torch.testing.assert_close(weight.data, torch.full((4,), 0.75))


def magic_with_groups(weight):
    optimizer = mock.MagicMock()
    optimizer.param_groups = [{"params": [weight]}]
    return optimizer, weight


def with_spec(weight):
    optimizer = mock.Mock(spec=torch.optim.SGD)
    optimizer.param_groups = [{"params": [weight]}]
    return optimizer, weight


def with_param_groups(weight):
    optimizer = mock.Mock(spec=["param_groups", "step"])
    optimizer.param_groups = [{"params": [weight]}]
    return optimizer, weight


def mocked_step(weight):
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.step = mock.Mock(return_value="stepped")
    return optimizer, weight


def wrapped_step(weight):
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
    optimizer.step = mock.Mock(wraps=optimizer.step)
    return optimizer, weight


def mocked_in_its_class(weight):
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.__class__ = type("SGD", (torch.optim.SGD,), {"step": mock.MagicMock(return_value="stepped")})
    return optimizer, weight


def mocked_like_its_class(weight):
    optimizer = torch.optim.Adam([weight], lr=0.5)
    optimizer.step = mock.create_autospec(optimizer.step)
    return optimizer, weight


def scheduled(weight):
    optimizer, weight = mocked_step(weight)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer, weight


def outcome(kind, make, factor, *, enabled, unscales):
    optimizer, weight = make(torch.nn.Parameter(torch.ones(4)))
    scaler = kind("cpu", init_scale=4.0, enabled=enabled)
    scaler.scale((weight * factor).sum()).backward()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    except (AssertionError, TypeError, RuntimeError) as error:
        return type(error)
    if isinstance(optimizer.step, type(scaler.step)):  # a scheduler has wrapped the step
        return weight.tolist(), weight.grad.tolist(), scaler.get_scale()
    calls = [(call.args, sorted(call.kwargs)) for call in optimizer.step.call_args_list]
    return calls, weight.tolist(), weight.grad.tolist(), scaler.get_scale()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("enabled", "factor"), [(False, 1.0), (True, 1.0), (True, math.inf)])
@pytest.mark.parametrize(
    "make",
    [
        *(magic_with_groups, with_spec, with_param_groups, mocked_step, wrapped_step),
        *(mocked_in_its_class, mocked_like_its_class, scheduled),
    ],
)
def test_a_mock_is_stepped_as_by_torch(make, factor, enabled, unscales):
    theirs, ours = (outcome(kind, make, factor, enabled=enabled, unscales=unscales) for kind in KINDS)
    if make is magic_with_groups and isinstance(ours, tuple):
        # The optimizer claims a fused kernel, which would divide the gradients by the scale. Our scaler
        # divides them first.
        theirs, ours = (result[:2] + result[3:] for result in (theirs, ours))
    assert ours == theirs


@pytest.mark.parametrize("make", [mock.Mock, mock.MagicMock, partial(mock.Mock, spec=["step"])])
def test_a_disabled_scaler_steps_any_object(make):
    """Engines and mocks may have no ``param_groups``."""
    for kind in KINDS:
        optimizer, scaler = make(), kind("cpu", enabled=False)
        assert scaler.step(optimizer, 1, mode="fast") is optimizer.step.return_value
        optimizer.step.assert_called_once_with(1, mode="fast")


def outcome_around(kind, *, is_known):
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    scaler, mocked = kind("cpu", init_scale=4.0), mock.MagicMock(wraps=optimizers[0])
    for optimizer in optimizers[not is_known :]:
        weights[0].grad = weights[1].grad = None
        scaler.scale(weights[0].sum() + weights[1].sum()).backward()
        scaler.step(optimizer)
        if optimizer is optimizers[0]:
            scaler.update()
    said = ""
    try:
        scaler.step(mocked)
    except AssertionError as error:
        said = str(error)[:22]
    return said, [weight.tolist() for weight in weights]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_mock_around_an_optimizer_does_not_step_with_scaled_gradients(is_known):
    """Most versions of Python show no parameters of the optimizer that such a mock wraps."""
    theirs, ours = (outcome_around(kind, is_known=is_known) for kind in KINDS)
    assert ours == theirs


class Holding(torch.optim.Optimizer):
    """Contains another optimizer and shares its groups, as SAM does."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.5)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


def direct(optimizer):
    return optimizer


def inner(optimizer):
    return optimizer.base


@pytest.mark.parametrize("stepping", [direct, inner])
@pytest.mark.parametrize("unscale", ["unscale_", "clip_grad_norm_", None])
def test_a_step_past_the_scaler_with_an_overflow_is_refused(stepping, unscale):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = Holding([weight]), GradScaler("cpu", init_scale=4.0)
    scaler.register(optimizer)
    scaler.scale((weight * math.inf).sum()).backward()
    if unscale == "unscale_":
        scaler.unscale_(optimizer)
    elif unscale:
        scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="past the scaler"):
        stepping(optimizer).step()
    assert weight.tolist() == [1.0] * 4
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale()) == ([1.0] * 4, 2.0)


@pytest.mark.parametrize("stepping", [direct, inner])
def test_a_step_past_the_scaler_with_mended_gradients_is_taken(stepping):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = Holding([weight]), GradScaler("cpu", init_scale=4.0)
    for value in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        scaler.unscale_(optimizer)
        weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        stepping(optimizer).step()
        scaler.update()
    assert weight.tolist() == [0.5] * 4
