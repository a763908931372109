"""Gradients of closures are unscaled and checked inside the closure, in both forms of step()."""

import math
from functools import partial

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import Run, build, everything, scaler_of

FORMS = ["positional", "keyword"]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization in its usual form: it climbs with the gradients that exist before the
    step.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure):
        params = self.param_groups[0]["params"]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        starts = [p.detach().clone() for p in params]
        torch._foreach_add_(params, torch._foreach_mul([p.grad for p in params], 0.05 / norm))
        torch.enable_grad()(closure)()
        torch._foreach_copy_(params, starts)
        self.base.step()


def call(scaler, optimizer, closure, form):
    if form == "positional":
        return scaler.step(optimizer, closure)
    return scaler.step(optimizer, closure=closure)


def closure_of(scaler, optimizer, loss_of):
    """Return the usual closure."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        scaler.scale(loss).backward()
        return loss

    return closure


def quadratic(dtype=torch.float32):
    torch.manual_seed(0)
    matrix, target = torch.randn(6, 6), torch.randn(6)
    param = torch.nn.Parameter(torch.zeros(6))

    def loss():
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            residual = torch.nn.functional.linear(param, matrix) - target
        return residual.float().square().mean() + 0.1 * param.square().sum()

    return param, loss


LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [LBFGS, partial(LBFGS, line_search_fn="strong_wolfe"), Sam])
def test_optimizers_that_need_closures_equal_float32(form, make):
    ends = []
    for dtype in (torch.float32, torch.float16):
        param, loss_of = quadratic(dtype)
        optimizer = make([param])
        scaler = GradScaler("cpu", init_scale=2.0**12, enabled=dtype is torch.float16)
        closure = closure_of(scaler, optimizer, loss_of)
        for _ in range(8):
            if make is Sam:
                closure()  # it reads gradients before it calls the closure
            call(scaler, optimizer, closure, form)
            scaler.update()
        ends.append(param.detach().clone())
    assert torch.allclose(*ends, atol=5e-3)
    assert ends[0].abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_a_closure_for_an_ordinary_optimizer(form, fused, scale):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=fused), scaler_of(scale)
    for loss, value in ((5.0, -1.0), (3.0, -2.0)):
        closure = closure_of(scaler, optimizer, lambda: param.sum() + 5)
        assert call(scaler, optimizer, closure, form).item() == loss
        assert param[0] == value
        scaler.update()


@pytest.mark.parametrize("kind", [Sam, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("drops", [False, True])
def test_an_overflow_before_the_step(kind, drops):
    """The step is skipped if the optimizer may use those gradients.

    torch's own optimizers read no gradient before they call the closure.
    """
    param, loss_of = quadratic()
    optimizer, scaler, losses = kind([param], lr=0.1), GradScaler("cpu", init_scale=8.0), []
    scaler.scale(loss_of() * math.inf).backward()

    def closure():
        if drops:
            optimizer.zero_grad()
        losses.append(loss_of())
        scaler.scale(losses[-1]).backward()
        return losses[-1]

    value = scaler.step(optimizer, closure)
    taken = drops and kind is not Sam
    assert (value is losses[0]) if taken else value is None
    assert len(losses) > 0 or kind is Sam
    scaler.update()
    assert scaler.last_step(optimizer).skipped is not taken
    assert scaler.get_scale() == (8.0 if taken else 4.0)


def test_an_unscaled_loss_in_the_closure_is_refused(weights):
    one, scaler = weights(), GradScaler("cpu", init_scale=8.0)
    one.train(scaler, 1.0)

    def closure():
        one.optimizer.zero_grad()
        one.loss().backward()

    with pytest.raises(RuntimeError, match="loss that was not scaled: call scaler.scale\\(loss\\).backward"):
        scaler.step(one.optimizer, closure)


def test_the_scaled_loss_as_the_closures_value_is_refused():
    """A scaled loss together with unscaled gradients would mislead a line search."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([param], line_search_fn="strong_wolfe")
    scaler = GradScaler("cpu", init_scale=8.0)

    def closure():
        optimizer.zero_grad()
        scaled = scaler.scale(param.square().sum())
        scaled.backward()
        return scaled

    with pytest.raises(RuntimeError, match=r"returned the scaled loss: .* return the loss itself"):
        scaler.step(optimizer, closure)
    assert param.tolist() == [1.0, 1.0]
    right = closure_of(scaler, optimizer, lambda: param.square().sum())
    assert scaler.step(optimizer, right).item() == 2.0
    assert param.tolist() == [0.0, 0.0]


class TwoCalls(torch.optim.SGD):
    """First climbs, then steps from the original point.

    So it changes weights before the closure's second call.
    """

    __module__ = "elsewhere"

    @torch.no_grad()
    def step(self, closure):
        torch.enable_grad()(closure)()
        params = self.param_groups[0]["params"]
        before = [param.clone() for param in params]
        torch._foreach_add_(params, [param.grad for param in params])
        loss = torch.enable_grad()(closure)()
        torch._foreach_copy_(params, before)
        super().step()
        return loss


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, TwoCalls])
@pytest.mark.parametrize("bad_call", [1, 2])
def test_a_closure_that_is_not_finite_changes_nothing(cls, bad_call, scale):
    model, optimizer = build(cls, {})
    scaler, calls, bad = scaler_of(scale), [], 0
    x = torch.randn(4, 4)

    def loss_of():
        calls.append(1)
        return model(x * (math.nan if len(calls) == bad else 1.0)).square().mean()

    closure = closure_of(scaler, optimizer, loss_of)
    assert isinstance(scaler.step(optimizer, closure), torch.Tensor)
    assert not scaler.last_step(optimizer).skipped
    scaler.update()
    before = everything(model, optimizer)
    calls.clear()
    bad = bad_call
    value = scaler.step(optimizer, closure=closure)
    if bad_call == 2 and cls in {torch.optim.SGD, torch.optim.Adam}:
        assert not scaler.last_step(optimizer).skipped
        return
    assert value is None if scale is not None else not value.isfinite()
    assert scaler.last_step(optimizer).skipped
    after = everything(model, optimizer)
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))


def test_weights_that_change_early_for_the_first_time_are_put_back(scale):
    class Late(TwoCalls):
        """Acts like TwoCalls from its second step on."""

        __module__ = "elsewhere"
        steps = 0

        def step(self, closure):
            self.steps += 1
            return TwoCalls.step(self, closure) if self.steps > 1 else torch.optim.SGD.step(self, closure)

    model, optimizer = build(Late, {})
    scaler, inputs = scaler_of(scale), iter([1.0, 1.0, math.nan])
    closure = closure_of(scaler, optimizer, lambda: model(torch.full((1, 4), next(inputs))).sum())
    scaler.step(optimizer, closure)
    scaler.update()
    before = everything(model, optimizer)
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).skipped
    after = everything(model, optimizer)
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))


@pytest.mark.native
@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_closures_of_known_optimizers_run_before_the_step(poison, scale):
    run = Run(scaler=scaler_of(scale))
    run.step()
    before = run.values()

    def closure():
        assert torch.is_grad_enabled()
        run.backward(factor=poison)
        run.scaler.clip_grad_norm_(run.optimizer, 0.5)
        return sum(param.sum() for param in run.params) * poison

    with torch.no_grad():
        loss = run.scaler.step(run.optimizer, closure)
    result = run.scaler.last_step(run.optimizer)
    assert (result.one_pass, result.skipped) == (True, math.isnan(poison))
    assert loss is None if scale and math.isnan(poison) else loss.isnan().item() is math.isnan(poison)
    assert all(map(torch.equal, before, run.values())) is math.isnan(poison)
