"""Closures: unscaled and checked inside, in both forms of step()."""

import math

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import closures
from tests.scaling.runs import SCALES, Run, build, everything, scaler_of

FORMS = ["positional", "keyword"]


def call(scaler, optimizer, closure, form):
    return (
        scaler.step(optimizer, closure) if form == "positional" else scaler.step(optimizer, closure=closure)
    )


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its usual two-call form."""

    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        params = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["start"] = p.detach().clone()
            p.add_(p.grad * (0.05 / norm))
        closure()
        for p in params:
            p.copy_(self.state[p]["start"])
        self.base.step()


def quadratic(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(6, 6)
    target = torch.randn(6)
    param = torch.nn.Parameter(torch.zeros(6))

    def loss():
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            residual = torch.nn.functional.linear(param, matrix) - target
        return residual.float().square().mean() + 0.1 * param.square().sum()

    return param, loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_equals_float32(form, line_search):
    ends = []
    for dtype in (torch.float32, torch.float16):
        param, loss_of = quadratic(dtype)
        optimizer = torch.optim.LBFGS([param], lr=0.5, max_iter=10, line_search_fn=line_search)
        scaler = GradScaler("cpu", init_scale=2.0**12, enabled=dtype is torch.float16)

        def closure():
            optimizer.zero_grad()
            loss = loss_of()
            scaler.scale(loss).backward()
            return loss

        for _ in range(8):
            call(scaler, optimizer, closure, form)
            scaler.update()
        ends.append(param.detach().clone())
    assert torch.allclose(*ends, atol=5e-3)
    assert ends[0].abs().max() > 0.1


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_for_an_ordinary_optimizer(form, fused, scale):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = scaler_of(scale)

    def closure():
        optimizer.zero_grad()
        loss = param.sum() + 5
        scaler.scale(loss).backward()
        return loss

    assert call(scaler, optimizer, closure, form).item() == 5.0
    assert param[0] == -1.0
    scaler.update()
    assert call(scaler, optimizer, closure, form).item() == 3.0
    assert param[0] == -2.0


@pytest.mark.parametrize("form", FORMS)
def test_sam_equals_float32(form):
    ends = []
    for enabled in (False, True):
        param, loss_of = quadratic(torch.float32)
        optimizer = Sam([param], torch.optim.SGD)
        scaler = GradScaler("cpu", enabled=enabled)

        def closure():
            optimizer.zero_grad()
            loss = loss_of()
            scaler.scale(loss).backward()
            return loss

        for _ in range(5):
            closure()
            call(scaler, optimizer, closure, form)
            scaler.update()
        ends.append(param.detach().clone())
    assert torch.allclose(*ends, rtol=1e-6)


def test_an_overflow_before_the_step_skips_it():
    param, loss_of = quadratic(torch.float32)
    optimizer = Sam([param], torch.optim.SGD)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of() * math.inf).backward()
    assert scaler.step(optimizer, lambda: pytest.fail("must not be called")) is None
    assert scaler.last_step(optimizer).skipped


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("drops", [False, True])
def test_torchs_own_look_at_no_gradient_before_their_closure(kind, drops):
    param, loss_of = quadratic(torch.float32)
    optimizer = kind([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of() * math.inf).backward()
    losses = []

    def closure():
        if drops:
            optimizer.zero_grad()
        losses.append(loss_of())
        scaler.scale(losses[-1]).backward()
        return losses[-1]

    assert (scaler.step(optimizer, closure) is losses[0]) is drops
    scaler.update()
    assert scaler.last_step(optimizer).skipped is not drops
    assert scaler.get_scale() == (8.0 if drops else 4.0)


def test_an_unscaled_loss_in_the_closure_is_refused():
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    def closure():
        optimizer.zero_grad()
        param.sum().backward()

    with pytest.raises(RuntimeError, match="loss that was not scaled: call scaler.scale\\(loss\\).backward"):
        scaler.step(optimizer, closure)


def test_the_scaled_loss_as_the_closures_value_is_refused():
    """Scaled losses and unscaled gradients lead a line search astray."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([param], line_search_fn="strong_wolfe")
    scaler = GradScaler("cpu", init_scale=8.0)

    def closure(scale_first):
        optimizer.zero_grad()
        loss = param.square().sum()
        scaled = scaler.scale(loss)
        scaled.backward()
        return scaled if scale_first else loss

    with pytest.raises(RuntimeError, match=r"returned the scaled loss: .* return the loss itself"):
        scaler.step(optimizer, lambda: closure(scale_first=True))
    assert param.tolist() == [1.0, 1.0]
    assert scaler.step(optimizer, lambda: closure(scale_first=False)).item() == 2.0
    assert param.tolist() == [0.0, 0.0]


class TwoCalls(torch.optim.SGD):
    """Climbs first, then steps from where it was: changes weights before the second call."""

    __module__ = "elsewhere"

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        before = [param.clone() for param in self.param_groups[0]["params"]]
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad)
        with torch.enable_grad():
            loss = closure()
        for param, old in zip(self.param_groups[0]["params"], before, strict=True):
            param.copy_(old)
        super().step()
        return loss


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, TwoCalls])
@pytest.mark.parametrize("bad_call", [1, 2])
def test_a_closure_that_is_not_finite_changes_nothing(cls, bad_call, scale):
    model, optimizer = build(cls, {})
    scaler, calls = scaler_of(scale), []
    x = torch.randn(4, 4)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x * (math.nan if len(calls) == bad else 1.0)).square().mean()
        scaler.scale(loss).backward()
        return loss

    bad = 0
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
    assert all(map(torch.equal, before[0] + before[1], [*after[0], *after[1]]))


@pytest.mark.parametrize(("scale", "counts"), [(None, (1, 3, 0)), (8.0, (3, 3, 0))])
def test_an_optimizer_that_calls_its_closure_first_is_copied_once(monkeypatch, scale, counts):
    """Where nothing is scaled a step shows whether the next needs a copy; overflows are no routine there."""

    class Foreign(torch.optim.SGD):
        __module__ = "elsewhere"

    copies, snapshot = [], closures.Snapshot
    monkeypatch.setattr(closures, "Snapshot", lambda o: copies.append(1) or snapshot(o))
    for cls, expected in zip((Foreign, TwoCalls, torch.optim.SGD), counts, strict=True):
        copies.clear()
        model, optimizer = build(cls, {})
        scaler = scaler_of(scale)

        def closure(model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            scaler.scale(loss).backward()
            return loss

        for _ in range(3):
            scaler.step(optimizer, closure)
            scaler.update()
        assert len(copies) == expected


def test_a_step_that_cannot_be_put_back_says_so():
    class Late(TwoCalls):
        """As TwoCalls from its second step on."""

        __module__ = "elsewhere"
        steps = 0

        def step(self, closure):
            self.steps += 1
            return TwoCalls.step(self, closure) if self.steps > 1 else torch.optim.SGD.step(self, closure)

    model, optimizer = build(Late, {})
    scaler, calls = scaler_of(None), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), math.nan if len(calls) == 3 else 1.0)).sum()
        loss.backward()
        return loss

    scaler.step(optimizer, closure)
    with pytest.raises(
        RuntimeError, match="Late: a closure's gradients are not finite after the step has changed"
    ):
        scaler.step(optimizer, closure)


@pytest.mark.native
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_closures_of_known_optimizers_run_before_the_step(poison, scale):
    run = Run(scaler=scaler_of(scale))
    run.step()
    before = run.values()

    def closure():
        run.optimizer.zero_grad()
        loss = sum(param.sum() for param in run.params) * poison
        assert torch.is_grad_enabled()
        run.scaler.scale(loss).backward()
        run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=True)
        return loss

    with torch.no_grad():
        loss = run.scaler.step(run.optimizer, closure)
    result = run.scaler.last_step(run.optimizer)
    assert (result.one_pass, result.skipped) == (True, math.isnan(poison))
    assert loss is None if scale and math.isnan(poison) else loss.isnan().item() is math.isnan(poison)
    assert all(map(torch.equal, before, run.values())) is math.isnan(poison)
