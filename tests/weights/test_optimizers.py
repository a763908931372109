"""Any optimizer steps weights stored in 16 bits as it steps float32 ones: bit for bit."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from transformers.optimization import Adafactor as TransformersAdafactor

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.weight import is_shown

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-2),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "transformers-Adafactor": lambda p: TransformersAdafactor(p, lr=1e-3, relative_step=False),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def pair(weights="bf16", **options):
    """A float32 network and a copy of it that is stored in 16 bits."""
    reference = network()
    if weights == "bf16-stochastic":
        reference.bfloat16().float()
    stored = copy.deepcopy(reference)
    return reference, stored, store_weights(stored, weights=weights, **options)


def give_gradients(step, *models):
    generator = torch.Generator().manual_seed(step)
    for params in zip(*(model.parameters() for model in models), strict=True):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.clone()


def exact(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_same(stored, reference):
    assert all(map(torch.equal, exact(stored), reference.state_dict().values()))


CASES = [*((name, "bf16") for name in OPTIMIZERS), ("AdamW", "fp16"), ("SGD", "fp16")]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_500_steps_equal_the_float32_run(name, weights):
    make, (reference, stored, store) = OPTIMIZERS[name], pair(weights)
    optimizer, ours = make(reference.parameters()), make(stored.parameters())
    store.add(ours)
    for step in range(500):
        give_gradients(step, reference, stored)
        optimizer.step()
        ours.step()
    if ours.defaults.get("fused"):  # a vectorized loop: within a bit of the last place
        for mine, other in zip(exact(stored), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, other, rtol=2.0**-23, atol=0)
    else:
        assert_same(stored, reference)
    states = [o.state_dict() for o in (optimizer, ours)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for theirs, mine in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert theirs.keys() == mine.keys()
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[name].dtype is value.dtype
                torch.testing.assert_close(mine[name], value, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_equals_the_float32_run(line_search):
    """The closure must give both the same gradients: they are of the float32 weights."""
    reference, stored, store = pair()
    inputs, targets = torch.randn(16, 7), torch.randn(16, 3)
    probe = copy.deepcopy(reference)

    def closure_of(model, optimizer, weights_of):
        def closure():
            optimizer.zero_grad()
            probe.load_state_dict(weights_of())
            loss = nn.functional.mse_loss(probe(inputs), targets)
            grads = torch.autograd.grad(loss, list(probe.parameters()))
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            return loss.detach()

        return closure

    runs = []
    for model, weights_of in (
        (reference, reference.state_dict),
        (stored, stored.state_dict),
    ):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
        store.add(optimizer)
        closure = closure_of(model, optimizer, weights_of)
        runs.append([optimizer.step(closure).item() for _ in range(125)])
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] / 2
    assert_same(stored, reference)


def test_a_closure_sees_the_model_and_a_step_sees_masters():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    seen = []

    def closure():
        seen.append([param.dtype for param in stored.parameters()])
        optimizer.zero_grad()
        loss = stored(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum()
        loss.backward()
        return loss

    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append([p.dtype for p in o.param_groups[0]["params"]])
    )
    for call in (optimizer.step, lambda c: optimizer.step(closure=c)):
        loss = call(closure)
        assert isinstance(loss, torch.Tensor)
    assert seen == [[torch.float32] * 4, [torch.bfloat16] * 4] * 2
    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [torch.bfloat16] * 4


def test_without_it_small_updates_are_lost():
    moved = {}
    for way in ("as it came", "stored"):
        model = network().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        store = store_weights(model, optimizer) if way == "stored" else None
        before = [p.detach().float() for p in model.parameters()]
        for step in range(50):
            give_gradients(step, network())
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(param.grad_dtype)
            optimizer.step()
        after = [p.detach().float() for p in model.parameters()] if store is None else exact(model)
        same = [torch.eq(*values) for values in zip(before, after, strict=True)]
        moved[way] = 1 - torch.cat([s.flatten() for s in same]).float().mean().item()
    assert moved["as it came"] < 0.1
    assert moved["stored"] == 1.0


def test_stochastic_rounding_follows_the_float32_run_and_is_reproducible():
    ends = []
    for _ in range(2):
        reference, stored, store = pair("bf16-stochastic", seed=3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (reference, stored)]
        store.add(optimizers[1])
        start = [p.detach().clone() for p in reference.parameters()]
        for _ in range(300):
            for model in (reference, stored):
                for param in model.parameters():
                    param.grad = torch.ones(param.shape)
            for optimizer in optimizers:
                optimizer.step()
        shift = [(s - p.float()).mean().item() for s, p in zip(start, stored.parameters(), strict=True)]
        assert sum(shift) / len(shift) == pytest.approx(0.03, rel=0.1), "the mean goes where float32 goes"
        ends.append([p.clone() for p in stored.parameters()])
    assert all(map(torch.equal, *ends))


# -- groups, gradients ----------------------------------------------------------------------------


def test_groups_joined_later_frozen_and_thawed():
    reference, stored, store = pair()
    optimizers = []
    for model in (reference, stored):
        optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-3}], lr=1e-2)
        store.add(optimizer)
        optimizers.append(optimizer)
    for step in range(30):
        if step == 5:
            for model, optimizer in zip((reference, stored), optimizers, strict=True):
                optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.1})
        for model in (reference, stored):
            model[0].weight.requires_grad_(not 10 <= step < 20)
        give_gradients(step, reference, stored)
        for model, optimizer in zip((reference, stored), optimizers, strict=True):
            if 10 <= step < 20:
                model[0].weight.grad = None
            optimizer.step()
    assert_same(stored, reference)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_in_float32(set_to_none):
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for scale in (1.0, 2.0**-9):
            (stored[0].weight.sum() * scale).backward()
        assert stored[0].weight.grad.dtype is torch.float32
        assert (stored[0].weight.grad == 1 + 2.0**-9).all(), "lost in bfloat16"
        kept = stored[0].weight.grad
        optimizer.step()
        assert stored[0].weight.grad is kept
        assert stored[2].weight.grad is None or not set_to_none


class Tied(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = kind(), nn.Linear(4, 5, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_are_stored_if_all_uses_are_cast():
    assert len(store_weights(Tied(lambda: nn.Embedding(5, 4)))) == 0
    model = Tied(lambda: nn.Linear(4, 5, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    store = store_weights(model, optimizer)
    assert len(store) == 1
    state = model.state_dict()
    assert state["first.weight"] is state["second.weight"], "safetensors looks for shared memory"
    assert model.state_dict()["first.weight"] is not state["first.weight"], "a new one each time"
    with store.in_fp32():
        assert model.second.weight is model.first.weight
        assert model.second.weight.dtype is torch.float32
    (model.first.weight.sum() + model.second.weight.sum()).float().backward()
    optimizer.step()
    assert model.first.weight.dtype is torch.bfloat16


def test_sparse_gradients():
    results = []
    for weights in (None, "bf16"):
        torch.manual_seed(0)
        model = nn.Embedding(6, 3, sparse=True)
        model.weight.data = model.weight.data.bfloat16().float()
        optimizer = torch.optim.SparseAdam(model.parameters())
        store_weights(model, optimizer, weights=weights or "fp32")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.tensor([1, 3, 3])).sum().backward()
            optimizer.step()
        results.append(exact(model)[0])
    assert torch.equal(*results)


# -- errors, exceptions, writes of others ---------------------------------------------------------


class Failing(torch.optim.SGD):
    """Fails after it has stepped."""

    def step(self, closure=None):
        super().step()
        raise KeyError("out of memory")


def test_an_exception_in_a_step_leaves_what_torch_leaves():
    reference, stored, store = pair()
    optimizers = [Failing(model.parameters(), lr=1e-3) for model in (reference, stored)]
    store.add(optimizers[1])
    for number in range(3):
        give_gradients(number, reference, stored)
        for optimizer in optimizers:
            with pytest.raises(KeyError):
                optimizer.step()
        assert_same(stored, reference)
        assert not is_shown(stored[0].weight), "16 bits again once the exception is dropped"
        assert stored[0].weight.dtype is torch.bfloat16


def test_a_hook_that_replaces_the_arguments_of_a_step_changes_nothing():
    reference, stored, store = pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (reference, stored)]
    store.add(optimizers[1])
    optimizers[1].register_step_pre_hook(lambda optimizer, args, kwargs: (tuple(args), dict(kwargs)))
    for number in range(3):
        give_gradients(number, reference, stored)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(stored, reference)


def test_a_closure_that_raises_leaves_the_model_as_it_was():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    before = exact(stored)

    def closure():
        raise KeyError("loss")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"][0] is stored[0].weight
    assert all(map(torch.equal, exact(stored), before))


def test_an_optimizer_with_a_list_of_its_own():
    class Hidden(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.own = list(self.param_groups[0]["params"])

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.own:
                param.sub_(1e-4)

    reference, stored, store = pair()
    optimizers = [Hidden(model.parameters()) for model in (reference, stored)]
    store.add(optimizers[1])
    give_gradients(0, reference, stored)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(stored, reference)


def test_state_in_16_bits_is_an_error():
    model = network().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"state 'exp_avg' of this AdamW is in torch.bfloat16: it has stepped"
    ):
        store_weights(model, optimizer)


@pytest.mark.parametrize(("weights", "error"), [("bf16", 2.0**-8), ("fp16", 0.0)])
def test_a_weight_that_somebody_else_writes_is_what_was_written(weights, error):
    """Of a pair the old low half stays beside it: at most half of the last place of bfloat16."""
    _, stored, _ = pair(weights)
    with torch.no_grad():
        stored[0].weight.fill_(0.5)
        stored[2].weight.data.fill_(0.25)  # no version moves
    for name, value in (("0.weight", 0.5), ("2.weight", 0.25)):
        assert ((stored.state_dict()[name] - value).abs() <= error * value).all()
        assert (stored.get_parameter(name) == value).all()


# -- with the scaler ------------------------------------------------------------------------------


def scaled_run(make, weights, *, steps=12, fold=False, poison=(4, 5)):
    torch.manual_seed(0)
    model = network()
    model.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
    optimizer = make(model.parameters())
    store_weights(model, optimizer, weights=weights)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    trail = []
    for step in range(steps):
        loss = sum((p.float() * (1 + i)).sum() for i, p in enumerate(model.parameters()))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in poison:
            next(model.parameters()).grad[0, 0] = torch.inf
        before = exact(model)
        scaler.clip_grad_norm_(optimizer, 1.0, fold=fold)
        scaler.step(optimizer)
        scaler.update()
        after = exact(model)
        assert scaler.last_step(optimizer).skipped is (step in poison)
        assert all(map(torch.equal, before, after)) is (step in poison), "a skipped step changes neither half"
        trail.append(after)
    return trail


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), {"fold": True}),
        (lambda p: torch.optim.AdamW(p, fused=True), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), {"fold": True}),
        (torch.optim.RMSprop, {}),
    ],
    ids=["folded", "fused", "folded-SGD", "plain"],
)
def test_overflows_are_skipped_and_clipping_is_the_same(make, options, weights):
    ours, reference = scaled_run(make, weights, **options), scaled_run(make, "fp32", **options)
    for stored, plain in zip(ours, reference, strict=True):
        for mine, other in zip(stored, plain, strict=True):
            torch.testing.assert_close(mine, other, rtol=2.0**-22, atol=1e-8)


def test_the_hooks_do_not_keep_a_clip_from_being_folded():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    store_weights(model, optimizer)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 7, dtype=torch.bfloat16)).float().sum()).backward()
    before = model[0].weight.grad.clone()
    scaler.clip_grad_norm_(optimizer, 1e-3, fold=True)
    assert torch.equal(model[0].weight.grad, before), "left to the kernel"
    scaler.step(optimizer)
    assert model[0].weight.grad.norm() < 1e-3


def test_an_overflow_within_a_closure_restores_both_halves():
    _, stored, store = pair()
    optimizer = torch.optim.LBFGS(stored.parameters(), max_iter=5)
    store.add(optimizer)
    scaler = GradScaler("cpu", init_scale=4.0)
    calls = []

    def closure():
        calls.append(exact(stored))
        optimizer.zero_grad()
        loss = stored(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum()
        scaler.scale(loss).backward()
        if len(calls) == 4:
            stored[0].weight.grad.fill_(torch.nan)
        return loss

    before = exact(stored)
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).skipped
    assert not torch.equal(calls[-1][0], before[0]), "the step had changed weights by then"
    assert all(map(torch.equal, exact(stored), before))


# -- life -----------------------------------------------------------------------------------------


def test_schedulers_made_before_and_after():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early = StepLR(optimizer, 1, 0.5)
    store_weights(model, optimizer)
    late = StepLR(optimizer, 1, 0.5)
    give_gradients(0, model)
    optimizer.step()
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_and_its_model_are_freed():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    gone = [weakref.ref(owner) for owner in (stored, optimizer, store)]
    del stored, optimizer, store
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_add_twice_is_once():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    store.add(optimizer)
    store_weights(stored, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


# -- optimizers that nobody has handed over -------------------------------------------------------

GUARD = GradScaler("cpu", enabled=False)
STEPS = {"step": lambda o: o.step(), "guard": GUARD.step, "closure": lambda o: o.step(lambda: None)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW-foreach", "AdamW-fused", "RMSprop"])
def test_they_step_float32_from_their_first_step_on(name, step):
    reference, stored, _ = pair()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (reference, stored)]
    for number in range(4):
        give_gradients(number, reference, stored)
        for optimizer in optimizers:
            STEPS[step](optimizer)
    if name == "AdamW-fused":
        for mine, other in zip(exact(stored), exact(reference), strict=True):
            torch.testing.assert_close(mine, other, rtol=2.0**-22, atol=0)
    else:
        assert_same(stored, reference)


def test_state_in_16_bits_is_an_error_before_anything_is_written():
    _, stored, _ = pair()
    early = torch.optim.SGD(stored.parameters(), lr=1.0, momentum=0.9)
    give_gradients(0, stored)
    early.step()
    late = torch.optim.SGD(stored.parameters(), lr=1.0, momentum=0.9)
    late.load_state_dict(early.state_dict())
    before = exact(stored)
    with pytest.raises(ValueError, match="the state 'momentum_buffer' of this SGD is in torch.bfloat16"):
        late.step()
    assert all(map(torch.equal, exact(stored), before))


def test_optimizers_of_other_weights_step_as_before():
    pair()
    other = network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    give_gradients(0, other)
    GUARD.step(optimizer)
    assert GUARD.last_step(optimizer).one_pass
    assert not optimizer._optimizer_step_pre_hooks
    torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()


# -- copies of optimizers -------------------------------------------------------------------------


class KeepsAll(torch.optim.AdamW):
    """An optimizer whose state is all that it has, hooks included."""

    def __getstate__(self):
        return self.__dict__.copy()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))])
@pytest.mark.parametrize("make", [torch.optim.AdamW, KeepsAll])
def test_a_copy_with_its_model_goes_on_in_float32(way, make):
    _, stored, store = pair()
    optimizer = make(stored.parameters(), lr=1e-3)
    store.add(optimizer)
    give_gradients(0, stored)
    optimizer.step()
    if make is KeepsAll and way is not copy.deepcopy:
        pytest.skip("hooks that torch.compiler.disable has wrapped cannot be pickled")
    others, other = way((optimizer, stored))
    assert others.param_groups[0]["params"][0] is other[0].weight
    assert type(other[0].weight) is nn.Parameter
    for number in range(1, 9):
        give_gradients(number, stored, other)
        optimizer.step()
        others.step()
    assert_same(stored, other)


def test_a_shallow_copy_steps_the_same_weights():
    reference, stored, store = pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (reference, stored)]
    store.add(optimizers[1])
    optimizers[1] = copy.copy(optimizers[1])
    for number in range(4):
        give_gradients(number, reference, stored)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(stored, reference)
