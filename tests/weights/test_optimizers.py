"""Any optimizer steps weights stored in 16 bits as it steps float32 ones: bit for bit."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from transformers.optimization import Adafactor as TransformersAdafactor

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.optimizer_view import view_of

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


def exact(store, model):
    return list(store.fp32_state_dict(model).values())


def assert_same(store, stored, reference):
    assert all(map(torch.equal, exact(store, stored), reference.state_dict().values()))


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
        for mine, other in zip(exact(store, stored), reference.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, other, rtol=2.0**-23, atol=0)
    else:
        assert_same(store, stored, reference)
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
        (stored, lambda: store.fp32_state_dict(stored)),
    ):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
        store.add(optimizer)
        closure = closure_of(model, optimizer, weights_of)
        runs.append([optimizer.step(closure).item() for _ in range(125)])
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] / 2
    assert_same(store, stored, reference)


def test_a_closure_sees_the_model_and_a_step_sees_masters():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    seen = []

    def closure():
        seen.append(
            [p is q for p, q in zip(optimizer.param_groups[0]["params"], stored.parameters(), strict=True)]
        )
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
    assert seen == [[torch.float32] * 4, [True] * 4] * 2
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
        after = [p.detach().float() for p in model.parameters()] if store is None else exact(store, model)
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
    assert_same(store, stored, reference)


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


def test_tied_weights_are_one_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    store = store_weights(model, optimizer)
    assert len(store) == 1
    with store.in_fp32(model):
        assert model.head.weight is model.embed.weight
        assert model.head.weight.dtype is torch.float32
    assert model.head.weight is model.embed.weight
    model(torch.arange(5)).float().square().sum().backward()
    optimizer.step()
    assert model.embed.weight.dtype is torch.bfloat16


def test_sparse_gradients():
    results = []
    for weights in (None, "bf16"):
        torch.manual_seed(0)
        model = nn.Embedding(6, 3, sparse=True)
        model.weight.data = model.weight.data.bfloat16().float()
        optimizer = torch.optim.SparseAdam(model.parameters())
        store = store_weights(model, optimizer, weights=weights or "fp32")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.tensor([1, 3, 3])).sum().backward()
            optimizer.step()
        results.append(exact(store, model)[0])
    assert torch.equal(*results)


# -- errors, exceptions, writes of others ---------------------------------------------------------


def test_an_exception_in_a_step_changes_nothing():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    before = exact(store, stored)
    fail = optimizer.register_step_post_hook(lambda *_: None)
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("out of memory")))
    give_gradients(0, stored)
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.zero_grad()
    handle.remove()
    fail.remove()
    optimizer.step()
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], stored.parameters(), strict=True))
    assert all(map(torch.equal, exact(store, stored), before)), "its gradients are gone with zero_grad"
    give_gradients(0, stored)
    optimizer.step()
    assert not any(map(torch.equal, exact(store, stored), before))


def test_a_closure_that_raises_leaves_the_model_as_it_was():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    before = exact(store, stored)

    def closure():
        raise KeyError("loss")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"][0] is stored[0].weight
    assert all(map(torch.equal, exact(store, stored), before))


def test_an_optimizer_with_a_list_of_its_own_is_an_error():
    class Hidden(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.own = list(self.param_groups[0]["params"])

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.own:
                param.sub_(0.1)

    _, stored, store = pair()
    optimizer = Hidden(stored.parameters())
    store.add(optimizer)
    with pytest.raises(
        RuntimeError, match=r"Hidden has written a weight of shape \(9, 7\) in torch.bfloat16"
    ):
        optimizer.step()


def test_state_in_16_bits_is_an_error():
    model = network().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"state 'exp_avg' of this AdamW is in torch.bfloat16: it has stepped"
    ):
        store_weights(model, optimizer)


def test_a_weight_that_somebody_else_writes_is_taken_as_it_is():
    for weights in ("bf16", "fp16"):
        _, stored, store = pair(weights)
        with torch.no_grad():
            stored[0].weight.fill_(0.5)
        assert (exact(store, stored)[0] == 0.5).all()
        stored[2].weight.data.fill_(0.25)  # no version moves
        moved = (exact(store, stored)[2] - 0.25).abs().max()
        assert moved <= (2.0**-10 if weights == "bf16" else 0.0), "less than bfloat16 shows"


def test_a_converted_model_is_an_error():
    _, stored, store = pair()
    optimizer = torch.optim.SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    stored.float()
    with pytest.raises(RuntimeError, match=r"is in torch.float32 now: something has converted the model"):
        optimizer.step()


# -- with the scaler ------------------------------------------------------------------------------


def scaled_run(make, weights, *, steps=12, fold=False, poison=(4, 5)):
    torch.manual_seed(0)
    model = network()
    model.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
    optimizer = make(model.parameters())
    store = store_weights(model, optimizer, weights=weights)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    trail = []
    for step in range(steps):
        loss = sum((p.float() * (1 + i)).sum() for i, p in enumerate(model.parameters()))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in poison:
            next(model.parameters()).grad[0, 0] = torch.inf
        before = exact(store, model)
        scaler.clip_grad_norm_(optimizer, 1.0, fold=fold)
        scaler.step(optimizer)
        scaler.update()
        after = exact(store, model)
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
            torch.testing.assert_close(mine, other, rtol=2.0**-22, atol=0)


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
        calls.append(exact(store, stored))
        optimizer.zero_grad()
        loss = stored(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum()
        scaler.scale(loss).backward()
        if len(calls) == 4:
            stored[0].weight.grad.fill_(torch.nan)
        return loss

    before = exact(store, stored)
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).skipped
    assert not torch.equal(calls[-1][0], before[0]), "the step had changed weights by then"
    assert all(map(torch.equal, exact(store, stored), before))


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
    view = view_of(optimizer)
    store.add(optimizer)
    store_weights(stored, optimizer)
    assert view_of(optimizer) is view
    assert len(optimizer._optimizer_step_pre_hooks) == 1
