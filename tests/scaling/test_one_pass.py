"""Steps in one pass: torch's results, torch's state, gradients left alone."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_plugin import GradScaler, store_weights
from amp_plugin.scaling.one_pass import why_not

pytestmark = pytest.mark.native

KINDS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


class Run:
    """Parameters, an optimizer and a scaler; the gradient of ``loss`` is what is asked for."""

    def __init__(self, kind="adamw", *, dtype=torch.float32, scaler=None, **options):
        generator = torch.Generator().manual_seed(0)
        shapes = [(3, 5), (33,), ()]
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
        cls, defaults = KINDS[kind]
        self.optimizer = cls(self.params, **{**defaults, **options})
        self.scaler = scaler or GradScaler("cpu", init_scale=2.0**10)

    def backward(self, seed=0, factor=1.0):
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        wanted = [torch.randn(p.shape, generator=generator) * factor for p in self.params]
        loss = sum((p * w.to(p.dtype)).sum() for p, w in zip(self.params, wanted, strict=True))
        self.scaler.scale(loss).backward()

    def step(self, seed=0, factor=1.0):
        self.backward(seed, factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.last_step(self.optimizer)

    def values(self):
        return [param.detach().clone() for param in self.params]


def ulps(ours, theirs, *, of_largest):
    """How far apart, in units in the last place of each element, or of the largest.

    torch's loop over last elements rounds the sum of a momentum at another place.
    """
    worst = 0.0
    largest = max(right.abs().max() for right in theirs)
    for mine, right in zip(ours, theirs, strict=True):
        size = largest if of_largest else right.abs()
        worst = max(worst, ((mine - right).abs() / size / torch.finfo(torch.float32).eps).max().item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_each_step_is_torchs_to_the_last_bit(kind, flags):
    """From the same start each time, so that a difference is one of this step."""
    run = Run(kind, **flags)
    run.step()
    for seed in range(5):
        twin = copy.deepcopy((run.params, run.optimizer))
        theirs = Run(kind, scaler=GradScaler("cpu", init_scale=2.0**10, one_pass=False))
        theirs.params, theirs.optimizer = twin
        assert run.step(seed).one_pass
        assert not theirs.step(seed).one_pass
        assert ulps(run.values(), theirs.values(), of_largest=kind == "momentum") <= 1.0
        ours_state, their_state = run.optimizer.state_dict(), theirs.optimizer.state_dict()
        assert ours_state["param_groups"] == their_state["param_groups"]
        assert ours_state["state"].keys() == their_state["state"].keys()
        for ours, right in zip(ours_state["state"].values(), their_state["state"].values(), strict=True):
            assert {k: (v.dtype, v.shape) for k, v in ours.items()} == {
                k: (v.dtype, v.shape) for k, v in right.items()
            }
            assert ours.get("step") == right.get("step")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": 1, "maximize": None}),
        (torch.optim.AdamW, {"amsgrad": 1, "maximize": 0}),
    ],
)
def test_flags_may_be_anything_that_is_true_or_false(kind, flags):
    weights = []
    for one_pass in (True, False):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer, scaler = kind([param], lr=0.1, **flags), GradScaler("cpu", one_pass=one_pass)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((param**2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append(param.detach())
    torch.testing.assert_close(*weights)
    assert weights[0].max() < 1


@pytest.mark.parametrize("overflow", [False, True])
def test_gradients_that_live_on_are_unscaled_and_clipped_when_asked_for(overflow):
    ours, theirs = Run("sgd"), Run("sgd", scaler=GradScaler("cpu", init_scale=2.0**10, one_pass=False))
    for run in (ours, theirs):
        run.backward(factor=1.0)
        run.scaler.clip_grad_norm_(run.optimizer, 0.1, fold=run is ours)
        if overflow:
            run.params[0].grad.data[0, 0] = torch.inf
        run.scaler.step(run.optimizer)
        run.scaler.update()
        assert run.scaler.last_step(run.optimizer).skipped is overflow
        run.scaler.ensure_unscaled(run.optimizer)
    if not overflow:
        for mine, right in zip(ours.params, theirs.params, strict=True):
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-6, atol=0)


def test_a_second_backward_adds_to_what_a_step_has_used():
    """zero_grad was forgotten, or left out on purpose: torch adds to unscaled, clipped gradients."""
    ours, theirs = Run("sgd"), Run("sgd", scaler=GradScaler("cpu", init_scale=2.0**10, one_pass=False))
    for run in (ours, theirs):
        run.optimizer.zero_grad = lambda: None
        for seed in range(3):
            run.backward(seed)
            run.scaler.clip_grad_norm_(run.optimizer, 0.5, fold=run is ours)
            run.scaler.step(run.optimizer)
            run.scaler.update()
    assert ours.scaler.last_step(ours.optimizer).one_pass
    for mine, right in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


WRITERS = {
    "unscale_": lambda run: run.scaler.unscale_(run.optimizer),
    "clip": lambda run: run.scaler.clip_grad_norm_(run.optimizer, 0.1),
    "clip of parameters": lambda run: run.scaler.clip_grad_norm_(run.params, 0.1),
    "clip of values": lambda run: run.scaler.clip_grad_value_(run.params, 0.01),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_gradients_that_a_clip_by_norm_has_written_are_stepped_in_one_pass(writer, kind, fused):
    """From the same start each time. After unscale_ torch's own step runs, to the last bit."""
    run = Run(kind, fused=fused)
    run.step()
    for seed in range(3):
        theirs = Run(kind, scaler=GradScaler("cpu", init_scale=2.0**10, one_pass=False))
        theirs.params, theirs.optimizer = copy.deepcopy((run.params, run.optimizer))
        seen = []
        for side in (run, theirs):
            side.scaler.register(side.optimizer)
            side.backward(seed)
            WRITERS[writer](side)
            seen.append([param.grad.clone() for param in side.params])
            side.scaler.step(side.optimizer)
            side.scaler.update()
        clipped = writer in {"clip", "clip of parameters"}
        assert run.scaler.last_step(run.optimizer).one_pass is clipped
        assert not theirs.scaler.last_step(theirs.optimizer).one_pass
        assert ulps(run.values(), theirs.values(), of_largest=kind == "momentum") <= (1.0 if clipped else 0.0)
        assert all(map(torch.equal, *seen))
        assert all(map(torch.equal, seen[0], [param.grad for param in run.params]))


def test_a_clip_of_dropped_gradients_is_forgotten():
    run = Run()
    run.step()
    run.backward()
    run.scaler.clip_grad_norm_(run.params, 0.1)
    run.backward(1)
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    assert not run.scaler.last_step(run.optimizer).one_pass


@pytest.mark.parametrize("late", [False, True])
def test_an_overflow_of_unscaled_gradients_changes_nothing(late):
    run = Run()
    run.step()
    before = run.values()
    run.backward()
    if not late:
        run.params[1].grad.data[3] = torch.inf
    run.scaler.clip_grad_norm_(run.params, 0.1)
    if late:
        run.params[1].grad.data[3] = torch.nan
    run.scaler.step(run.optimizer)
    result = run.scaler.last_step(run.optimizer)
    assert (result.skipped, result.one_pass) == (True, True)
    assert all(map(torch.equal, run.values(), before))


def test_gradients_that_another_optimizer_steps_too_are_left_to_torch():
    run = Run("sgd")
    other = torch.optim.SGD(run.params[:1], lr=0.1)
    run.scaler.register(other)
    run.backward()
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).not_one_pass_because == (
        "its gradients are unscaled already, shared, or of several scales"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_changes_nothing(kind):
    run = Run(kind)
    run.step()
    before, state = run.values(), copy.deepcopy(run.optimizer.state_dict())
    called = []
    hook = lambda *_: called.append(1)  # noqa: E731
    hook.leaves_gradients = True
    run.optimizer.register_step_post_hook(hook)
    run.backward()
    run.params[1].grad.data[3] = torch.nan
    run.scaler.step(run.optimizer)
    result = run.scaler.last_step(run.optimizer)
    assert (result.skipped, result.one_pass, called) == (True, True, [])
    assert result.overflow_report().nan == ("param 1",) or "1" in result.overflow_report().nan[0]
    assert all(map(torch.equal, run.values(), before))
    assert str(run.optimizer.state_dict()) == str(state)


EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 99), st.sampled_from([0.01, 1.0, 100.0])),
    st.tuples(st.just("clip"), st.integers(0, 99), st.sampled_from([0.1, 1e6])),
    st.tuples(st.just("overflow"), st.integers(0, 99), st.sampled_from([torch.inf, torch.nan])),
    st.tuples(
        st.just("options"), st.sampled_from(["lr", "weight_decay", "betas", "momentum"]), st.floats(0.01, 0.9)
    ),
    st.tuples(st.just("flags"), st.sampled_from(["fused", "foreach", "maximize"]), st.booleans()),
    st.tuples(st.just("group"), st.integers(0, 99), st.floats(0.01, 0.5)),
    st.tuples(st.just("round trip"), st.none(), st.none()),
    st.tuples(st.just("switch"), st.none(), st.none()),
    st.tuples(st.just("no gradient"), st.integers(0, 2), st.none()),
)


class Oracle:
    """The same run in float64, by torch.optim, without a loss scale."""

    def __init__(self, run, kind):
        self.params = [torch.nn.Parameter(param.detach().double()) for param in run.params]
        cls, defaults = KINDS[kind]
        self.optimizer = cls(self.params, **defaults)

    def step(self, run, max_norm=None, scale=1.0):
        for param, other in zip(self.params, run.params, strict=True):
            param.grad = None if other.grad is None else other.grad.double() / scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()


class Player:
    """Plays events on a run and on its oracle."""

    def __init__(self, kind):
        self.run = Run(kind)
        self.oracle = Oracle(self.run, kind)
        self.scalers = itertools.cycle(
            [GradScaler("cpu", init_scale=64.0, one_pass=on) for on in (False, True)]
        )
        self.without = None

    def play(self, event, first, second):
        getattr(self, "on_" + event.replace(" ", "_"))(first, second)

    def backward(self, seed, factor=1.0):
        self.run.backward(seed, factor)
        if self.without is not None:
            self.run.params[self.without].grad, self.without = None, None

    def on_step(self, seed, factor):
        self.backward(seed, factor)
        self.oracle.step(self.run, scale=self.run.scaler.get_scale())
        self.finish()

    def on_clip(self, seed, max_norm):
        self.backward(seed)
        self.oracle.step(self.run, max_norm, scale=self.run.scaler.get_scale())
        self.run.scaler.clip_grad_norm_(self.run.optimizer, max_norm, fold=bool(seed % 2))
        self.finish()

    def on_overflow(self, seed, value):
        self.backward(seed)
        grad = next(param.grad for param in self.run.params if param.grad is not None)
        grad.data.flatten()[0] = value
        self.finish()

    def finish(self):
        self.spare_torch()
        self.run.scaler.step(self.run.optimizer)
        self.run.scaler.update()

    def spare_torch(self):
        """Torch's fused SGD is a TypeError where only some parameters of a group have a momentum buffer yet."""
        state = self.run.optimizer.state
        for group in self.run.optimizer.param_groups:
            with_gradient = [param for param in group["params"] if param.grad is not None]
            begun = [
                state[param].get("momentum_buffer") is not None for param in with_gradient if param in state
            ]
            if group.get("momentum") and 0 < sum(begun) < len(with_gradient):
                group["fused"] = None

    def on_options(self, name, value):
        for optimizer in (self.run.optimizer, self.oracle.optimizer):
            for group in optimizer.param_groups:
                if name == "betas" and "betas" in group:
                    group["betas"] = (value, 1 - value / 100)
                elif name in group and not (name == "momentum" and group["momentum"] == 0):
                    group[name] = value

    def on_flags(self, name, value):
        for group in self.run.optimizer.param_groups:
            if name != "maximize":
                group["fused"], group["foreach"] = None, None
            group[name] = value
        for group in self.oracle.optimizer.param_groups:
            group["maximize"] = self.run.optimizer.param_groups[0]["maximize"]

    def on_group(self, seed, lr):
        param = torch.nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(seed)))
        maximize = self.run.optimizer.param_groups[0]["maximize"]
        self.run.params.append(param)
        self.run.optimizer.add_param_group({"params": [param], "lr": lr, "maximize": maximize})
        self.oracle.params.append(torch.nn.Parameter(param.detach().double()))
        self.oracle.optimizer.add_param_group(
            {"params": [self.oracle.params[-1]], "lr": lr, "maximize": maximize}
        )

    def on_round_trip(self, *_):
        self.run.optimizer.load_state_dict(copy.deepcopy(self.run.optimizer.state_dict()))

    def on_switch(self, *_):
        self.run.optimizer.zero_grad()
        self.run.scaler = next(self.scalers)

    def on_no_gradient(self, which, _):
        self.without = which


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(KINDS)), st.lists(EVENTS, min_size=3, max_size=14))
def test_random_runs_against_float64(kind, events):
    player = Player(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for event in events:
            player.play(*event)
    for param, right in zip(player.run.params, player.oracle.params, strict=True):
        torch.testing.assert_close(param.detach().double(), right.detach(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_stored_weights_are_stepped_as_they_are(kind, weights):
    def trained(one_pass, weights):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
        cls, options = KINDS[kind]
        optimizer = cls(model.parameters(), **options, foreach=False)
        store_weights(model, optimizer, weights=weights)
        scaler = GradScaler("cpu", init_scale=2.0**8, one_pass=one_pass)
        taken = []
        for seed in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            taken.append(scaler.last_step(optimizer).one_pass)
        return dict(model.state_dict()), taken, optimizer.state_dict()["state"]

    right, by_torch, their_state = trained(False, weights)
    ours, taken, our_state = trained(True, weights)
    assert (by_torch, taken) == ([False] * 6, [False] + [weights == "bf16"] * 5)
    for name, value in right.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)
    assert {k: v.dtype for k, v in our_state[0].items()} == {k: v.dtype for k, v in their_state[0].items()}


def test_stored_weights_without_a_low_half_are_left_to_the_optimizer():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store_weights(model, optimizer, weights="bf16-stochastic")
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum()).backward()
    scaler.step(optimizer)
    assert (
        "a weight is stored with weights='bf16-stochastic'"
        in scaler.last_step(optimizer).not_one_pass_because
    )


class OtherSGD(torch.optim.SGD):
    """A subclass, which may do anything."""


def hooked(optimizer, hook):
    getattr(optimizer, hook)(lambda *_: None)
    return optimizer


def replaced(optimizer):
    optimizer.step = lambda *_: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: OtherSGD(p, lr=0.1), "it is OtherSGD, not exactly Adam, AdamW or SGD of torch.optim"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "it is RMSprop, not exactly"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
        (
            lambda p: hooked(torch.optim.SGD(p, lr=0.1), "register_step_pre_hook"),
            "a hook runs before its step",
        ),
        (lambda p: replaced(torch.optim.SGD(p, lr=0.1)), "its step was replaced"),
    ],
)
def test_other_optimizers_run_their_own_step(make, text):
    assert text in why_not(make([torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize(
    ("param", "grad", "text"),
    [
        (torch.ones(2, dtype=torch.float64), None, "parameter 0 is Double of shape [2]"),
        (torch.ones(2, dtype=torch.complex64), None, "parameter 0 is ComplexFloat"),
        (torch.ones(2), torch.ones(2).to_sparse(), "parameter 0 has a gradient that is Float of shape [2], layout Sparse"),
    ],
)  # fmt: skip
def test_other_tensors_are_left_to_the_optimizer(param, grad, text):
    param = torch.nn.Parameter(param)
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler("cpu")
    scaler.scale(param.abs().sum()).backward()
    if grad is not None:
        param.grad = grad * scaler.get_scale()
    scaler.step(optimizer)
    result = scaler.last_step(optimizer)
    assert not result.one_pass
    assert text in result.not_one_pass_because


def test_reasons_that_belong_to_a_call():
    run = Run("adamw")
    assert run.step().not_one_pass_because == "parameter 0 has no state yet, which torch's own step makes"
    assert run.step().not_one_pass_because == ""
    off = Run("adamw", scaler=GradScaler("cpu", one_pass=False))
    off.step()
    assert off.step().not_one_pass_because == "one_pass=False"
    doubled = torch.nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        run.optimizer = torch.optim.SGD([doubled, doubled], lr=0.1)
    run.params = [doubled]
    assert run.step().not_one_pass_because == "parameter 1 is there twice"


def test_schedulers_see_the_step_and_hooks_run():
    run = Run("adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    seen = []
    hook = lambda optimizer, args, kwargs: seen.append((optimizer, args, kwargs))  # noqa: E731
    hook.leaves_gradients = True
    run.optimizer.register_step_post_hook(hook)
    for _ in range(3):
        result = run.step()
        scheduler.step()  # warns if no step has been counted
    assert result.one_pass
    assert seen == [(run.optimizer, (run.optimizer,), {})] * 3


def test_a_scaler_pickled_before_the_option_loads():
    scaler = GradScaler("cpu")
    state = scaler.__getstate__()
    del state["_one_pass"]
    other = GradScaler.__new__(GradScaler)
    other.__setstate__(state)
    run = Run("sgd", scaler=other)
    assert run.step().one_pass


def test_a_loss_scaled_by_hand_is_stepped_in_one_pass():
    """No backward of a scaled loss was seen: after an update, new gradients are taken for scaled ones."""
    run, theirs = Run("adamw"), Run("adamw")
    for seed in range(3):
        assert theirs.step(seed).one_pass is (seed > 0)
        if seed == 0:
            run.step(seed)
            continue
        run.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        wanted = [torch.randn(p.shape, generator=generator) for p in run.params]
        loss = sum((p * w).sum() for p, w in zip(run.params, wanted, strict=True))
        (loss * run.scaler.get_scale()).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        assert run.scaler.last_step(run.optimizer).one_pass
    assert all(map(torch.equal, run.values(), theirs.values()))


def test_parameters_may_be_kept_in_a_tuple():
    run, theirs = Run("adamw"), Run("adamw")
    run.optimizer.param_groups[0]["params"] = (*run.optimizer.param_groups[0]["params"],)
    for seed in range(2):
        assert run.step(seed).one_pass is theirs.step(seed).one_pass
    assert all(map(torch.equal, run.values(), theirs.values()))
