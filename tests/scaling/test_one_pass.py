"""One-pass steps give torch's results and torch's state. If another step is taken, the reason is known."""

import copy
import itertools

import pytest
import torch

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.one_pass import why_not
from tests.scaling.runs import KINDS, Run, scaler_of, ulps

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_each_step_is_torchs_to_the_last_bit(kind, flags, scale):
    """Each step starts from the same state, so a difference comes from this step."""
    run = Run(kind, scaler=scaler_of(scale), **flags)
    run.step()
    for seed in range(5):
        twin = copy.deepcopy((run.params, run.optimizer))
        theirs = Run(kind, scaler=scaler_of(scale, one_pass=False))
        theirs.params, theirs.optimizer = twin
        assert run.step(seed).one_pass
        assert "one_pass=False" in theirs.step(seed).how
        assert ulps(run.values(), theirs.values(), of_largest=kind == "momentum") <= 1.0
        ours, right = (described(side.optimizer.state_dict()) for side in (run, theirs))
        assert ours == right


def described(state_dict):
    """Return a state dict with dtypes and shapes in place of tensors, except for step counts."""
    return {
        **state_dict,
        "state": {
            key: {k: (v.dtype, v.shape, v.item() if k == "step" else None) for k, v in state.items()}
            for key, state in state_dict["state"].items()
        },
    }


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("momentum", {"nesterov": 1, "maximize": None}), ("adamw", {"amsgrad": 1, "maximize": 0})],
)
def test_flags_may_be_anything_that_is_true_or_false(kind, flags):
    ours, theirs = (Run(kind, scaler=scaler_of(8.0, one_pass=on), **flags) for on in (True, False))
    for seed in range(3):
        ours.step(seed), theirs.step(seed)
    torch.testing.assert_close(ours.values(), theirs.values())


def set_options(**options):
    """Return a change that sets options of an optimizer."""

    def change(run):
        for group in run.optimizer.param_groups:
            group.update({name: value for name, value in options.items() if name in group})

    return change


def add_a_group(run):
    run.params.append(torch.nn.Parameter(torch.linspace(-1.0, 1.0, 9)))
    run.optimizer.add_param_group({"params": [run.params[-1]], "lr": 0.05})


def step_without_a_gradient(run):
    run.backward(7)
    run.params[1].grad = None
    run.scaler.step(run.optimizer)
    run.scaler.update()


def take_the_other_step(run):
    one_pass = not run.scaler.last_step(run.optimizer).one_pass
    run.scaler = scaler_of(run.scaler.get_scale() if run.scaler.is_enabled() else None, one_pass=one_pass)


CHANGES = {
    "options": set_options(lr=0.3, weight_decay=0.5, betas=(0.3, 0.7), amsgrad=False, nesterov=False),
    "momentum": set_options(momentum=0.4),
    "foreach": set_options(foreach=True, fused=None),
    "fused": set_options(foreach=None, fused=True),
    "maximize": set_options(maximize=True),
    "group": add_a_group,
    "no gradient": step_without_a_gradient,
    "round trip": lambda run: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
    "overflow": lambda run: run.step(8, torch.inf),
    "clip": lambda run: run.clip_and_step(9, 0.1),
    "other step": take_the_other_step,
}


@pytest.mark.parametrize("kind", KINDS)
def test_changes_between_steps(kind, scale):
    """Every pair of changes is compared with torch's own step."""
    for names in itertools.combinations(CHANGES, 2):
        ours, theirs = (Run(kind, scaler=scaler_of(scale, one_pass=on)) for on in (True, False))
        for run in (ours, theirs):
            run.step(), run.step(1)
            for name in names:
                CHANGES[name](run)
                run.step(2), run.step(3)
        ends = [run.scaler.last_step(run.optimizer).one_pass for run in (ours, theirs)]
        assert sum(ends) == 1, names
        torch.testing.assert_close(
            ours.values(), theirs.values(), rtol=1e-5, atol=1e-6, msg=lambda text, n=names: f"{n}: {text}"
        )


WRITERS = {
    "unscale_": lambda run: run.scaler.unscale_(run.optimizer),
    "clip": lambda run: run.scaler.clip_grad_norm_(run.optimizer, 0.1),
    "clip of parameters": lambda run: run.scaler.clip_grad_norm_(run.params, 0.1),
    "clip of values": lambda run: run.scaler.clip_grad_value_(run.params, 0.01),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_gradients_that_were_unscaled_in_place_are_stepped_in_one_pass(writer, kind, fused):
    """Each step starts from the same state, and the gradients were unscaled or clipped in different ways."""
    run = Run(kind, fused=fused)
    run.step()
    for seed in range(3):
        theirs = Run(kind, scaler=scaler_of(2.0**10, one_pass=False))
        theirs.params, theirs.optimizer = copy.deepcopy((run.params, run.optimizer))
        seen = []
        for side in (run, theirs):
            side.scaler.register(side.optimizer)
            side.backward(seed)
            WRITERS[writer](side)
            seen.append([param.grad.clone() for param in side.params])
            side.scaler.step(side.optimizer)
            side.scaler.update()
        assert run.scaler.last_step(run.optimizer).one_pass
        assert not theirs.scaler.last_step(theirs.optimizer).one_pass
        assert ulps(run.values(), theirs.values(), of_largest=kind == "momentum") <= 1.0
        assert all(map(torch.equal, *seen))
        assert all(map(torch.equal, seen[0], [param.grad for param in run.params]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_were_unscaled_or_are_shared_are_stepped_in_one_pass(shared, fused):
    run = Run("sgd", fused=fused)
    if shared:
        run.scaler.register(torch.optim.SGD(run.params[:1], lr=0.1))
    run.backward(1)
    run.scaler.unscale_(run.optimizer)
    run.scaler.clip_grad_norm_(run.optimizer, 0.1)
    run.scaler.step(run.optimizer)
    assert run.scaler.last_step(run.optimizer).how == "in one pass"


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_stored_weights_are_stepped_as_they_are(kind, weights, scale):
    def trained(one_pass):
        torch.manual_seed(0)
        model, taken = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)), []
        cls, options = KINDS[kind]
        optimizer, scaler = (
            cls(model.parameters(), **options, foreach=False),
            scaler_of(scale, one_pass=one_pass),
        )
        store_weights(model, optimizer, weights=weights)
        for seed in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            taken.append(scaler.last_step(optimizer).one_pass)
        state = {key: value.dtype for key, value in optimizer.state_dict()["state"][0].items()}
        return dict(model.state_dict()), taken, state

    right, by_torch, their_state = trained(one_pass=False)
    ours, taken, our_state = trained(one_pass=True)
    assert (by_torch, taken) == ([False] * 6, [False] + [True] * 5)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-7)
    assert our_state == their_state


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_are_kept_alone_are_rounded_as_by_the_own_step(make):
    """Both use the same random bits. A skipped step uses none."""
    ends = {}
    for one_pass in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 7)
        optimizer = make(model.parameters(), lr=1e-4)
        store_weights(model, optimizer, weights="bf16-stochastic")
        scaler = GradScaler("cpu", init_scale=8.0, one_pass=one_pass)
        for number in range(6):
            optimizer.zero_grad()
            inputs = torch.full((2, 300), float("inf") if number == 3 else 1.0, dtype=torch.bfloat16)
            before = [param.clone() for param in model.parameters()]
            scaler.scale(model(inputs).float().sum()).backward()
            scaler.step(optimizer)
            assert scaler.last_step(optimizer).skipped == (number == 3)
            same = all(map(torch.equal, before, model.parameters()))
            assert same == (number == 3)
            scaler.update()
        assert scaler.last_step(optimizer).one_pass is one_pass
        ends[one_pass] = [param.detach().float() for param in model.parameters()]
    for ours, right in zip(*ends.values(), strict=True):
        assert (ours == right).float().mean() > 0.99, "the others: a last place of the step"


def test_rounding_at_random_in_one_pass_is_unbiased():
    """Each trial starts from the same state. The mean is the float32 result."""
    moved = []
    for seed in range(20):
        model = torch.nn.Linear(4096, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        # a quarter of the distance between two bfloat16 numbers
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        store_weights(model, optimizer, weights="bf16-stochastic", seed=seed)
        scaler = GradScaler("cpu", enabled=False)
        model.weight.grad = torch.ones(1, 4096)
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).one_pass
        moved.append(1 - model.weight.detach().float())
    moved = torch.stack(moved)
    assert set(moved.unique().tolist()) == {0.0, 2.0**-8}
    assert moved.mean().item() == pytest.approx(2.0**-10, rel=0.02)
    assert (moved.mean(0) / 2.0**-10 - 1).abs().mean() < 0.5, "no element stands still"


OTHER = type("OtherSGD", (torch.optim.SGD,), {})


def changed_sgd(change):
    """Make an SGD optimizer and change something about it."""

    def make(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        change(optimizer)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (OTHER, "there is no rule for the class "),
        (torch.optim.Rprop, "there is no rule for the class torch.optim.rprop.Rprop"),
        (lambda params: torch.optim.SGD(params, lr=0.1, differentiable=True), "differentiable=True"),
        (changed_sgd(lambda o: o.register_step_pre_hook(lambda *_: None)), "a hook runs before its step"),
        (changed_sgd(lambda o: setattr(o, "step", lambda *_: None)), "its step was replaced"),
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
    assert text in result.how


def test_reasons_that_belong_to_a_call(scale):
    run = Run("adamw", scaler=scaler_of(scale))
    assert "parameter 0 has no state yet; torch's own step creates it" in run.step().how
    assert run.step().how == "in one pass"
    doubled = torch.nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        run.optimizer = torch.optim.SGD([doubled, doubled], lr=0.1)
    run.params = [doubled]
    assert "parameter 1 is listed twice" in run.step().how


def test_schedulers_see_the_step_and_hooks_run(scale):
    run = Run("adamw", scaler=scaler_of(scale))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    seen = []
    run.optimizer.register_step_post_hook(lambda *given: seen.append(given))
    for _ in range(3):
        result = run.step()
        scheduler.step()  # would warn if no step had been counted
    assert result.one_pass
    result = run.step(factor=torch.inf)
    assert (result.skipped, result.one_pass) == (True, True)
    assert seen == [(run.optimizer, (run.optimizer,), {})] * 3


def test_a_scaler_pickled_before_the_option_loads():
    state = {
        name: value for name, value in GradScaler("cpu").__getstate__().items() if "one_pass" not in name
    }
    other = GradScaler.__new__(GradScaler)
    other.__setstate__(state)
    run = Run("sgd", scaler=other)
    assert run.step().one_pass


def test_parameters_may_be_kept_in_a_tuple():
    run, theirs = Run("adamw"), Run("adamw")
    run.optimizer.param_groups[0]["params"] = (*run.optimizer.param_groups[0]["params"],)
    for seed in range(2):
        assert run.step(seed).one_pass is theirs.step(seed).one_pass
    assert all(map(torch.equal, run.values(), theirs.values()))
