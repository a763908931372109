"""Any optimizer steps weights that are stored in 16 bits exactly as it steps float32 weights: bit for bit."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from transformers.optimization import Adafactor as TransformersAdafactor

from amp_plugin import GradScaler, restore_weights, store_weights
from amp_plugin.weights.optimizer_hooks import add_optimizer
from amp_plugin.weights.store import in_fp32
from tests.weights.twins import (
    TORCHS,
    assert_same,
    assert_steps_and_resumes,
    exact,
    give_gradients,
    network,
    step,
    stepped_twins,
    train,
    twins,
)


class Container(Optimizer):
    """An optimizer that contains one optimizer per parameter, as torchtitan's does."""

    def __init__(self, params):
        super().__init__(list(params), {})
        self.inner = [AdamW([param], lr=1e-3) for param in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


class Hidden(SGD):
    """An optimizer that keeps a second list of its parameters."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.own = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.own:
            param.sub_(1e-4)


class Decays(SGD):
    """An optimizer that calls its base class's step and then changes weights."""

    def __init__(self, params, error=None):
        SGD([torch.ones(1)], lr=0.0)  # this makes torch run hooks in the base class's step, too
        super().__init__(params, lr=1e-3, momentum=0.9)
        self.error = error

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - 1e-5)
        if self.error:
            raise self.error
        return loss


def library(module, name):
    """Return a function that makes an optimizer of an optional package."""

    def make(*args, **options):
        return getattr(pytest.importorskip(module), name)(*args, **options)

    return make


OPTIMIZERS = {
    **TORCHS,
    "AdamW-fused": lambda p: AdamW(p, lr=1e-3, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Rprop": torch.optim.Rprop,
    "transformers-Adafactor": lambda p: TransformersAdafactor(p, lr=1e-3, relative_step=False),
    "list-of-its-own": Hidden,
    "more-than-its-base": Decays,
    "others": Container,
    **{
        name: library("pytorch_optimizer", name)
        for name in ("Lion", "Lamb", "Adan", "ScheduleFreeAdamW", "Shampoo", "RAdam", "Prodigy")
    },
}


def assert_within_a_bit(one, other):
    """Compare the results of a fused step, whose vectorized loop may differ in the last bit."""
    torch.testing.assert_close(exact(one), exact(other), rtol=2.0**-22, atol=0)


CASES = [*((name, "bf16") for name in OPTIMIZERS), ("AdamW", "fp16"), ("SGD", "fp16")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "weights"), CASES)
def test_200_steps_equal_the_float32_run(name, weights):
    (reference, stored), optimizers = stepped_twins(OPTIMIZERS[name], weights)
    train((reference, stored), optimizers, 200)
    (assert_within_a_bit if "fused" in name else assert_same)(reference, stored)
    theirs, mine = (optimizer.state_dict() for optimizer in optimizers)
    torch.testing.assert_close(mine, theirs, rtol=2.0**-23, atol=0)


GUARD = GradScaler("cpu", enabled=False)
STEPS = {"step": lambda o: o.step(), "guard": GUARD.step, "closure": lambda o: o.step(lambda: None)}


@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize("name", ["AdamW", "AdamW-fused", "RMSprop", "Adagrad", "more-than-its-base"])
def test_those_that_nobody_has_handed_over_step_float32_from_their_first_step_on(name, way):
    models = twins()[:2]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    for number in range(4):
        give_gradients(number, *models)
        for optimizer in optimizers:
            STEPS[way](optimizer)
    (assert_within_a_bit if "fused" in name else assert_same)(*models)


@pytest.mark.native
def test_those_of_other_weights_step_as_before():
    twins()
    other = network()
    optimizer = SGD(other.parameters(), lr=0.1)
    give_gradients(0, other)
    GUARD.step(optimizer)
    assert GUARD.last_step(optimizer).one_pass
    assert not optimizer._optimizer_step_pre_hooks
    torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_equals_the_float32_run(line_search):
    """The closure gives both models the same gradients, because it computes them from the float32 weights."""
    models, optimizers = stepped_twins(
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn=line_search)
    )
    inputs, targets, probe = torch.randn(16, 7), torch.randn(16, 3), network()

    def run(model, optimizer):
        def closure():
            probe.load_state_dict(model.state_dict())
            probe.zero_grad()
            loss = nn.functional.mse_loss(probe(inputs), targets)
            loss.backward()
            for param, other in zip(model.parameters(), probe.parameters(), strict=True):
                param.grad = other.grad
            return loss.detach()

        return [optimizer.step(closure).item() for _ in range(50)]

    runs = [run(*pair) for pair in zip(models, optimizers, strict=True)]
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] / 2
    assert_same(*models)


def test_a_closure_sees_the_model_and_a_step_sees_masters():
    (_, stored), (_, optimizer) = stepped_twins(lambda p: SGD(p, lr=0.1))
    seen = []

    def closure(*_):
        seen.append({param.dtype for param in stored.parameters()})
        return loss_of(stored) if stored[0].weight.dtype is torch.bfloat16 else None

    optimizer.register_step_pre_hook(closure)
    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert isinstance(optimizer.step(closure=closure), torch.Tensor)
    closure()
    assert seen == [{torch.float32}, {torch.bfloat16}] * 2 + [{torch.bfloat16}]


def loss_of(model):
    return model(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum()


def test_stochastic_rounding_follows_the_float32_run_and_is_reproducible():
    ends = []
    for _ in range(2):
        start, stored, store = twins("bf16-stochastic", seed=3)
        optimizer = SGD(stored.parameters(), lr=1e-4)
        store.add(optimizer)
        for _ in range(300):
            for param in stored.parameters():
                param.grad = torch.ones(param.shape)
            optimizer.step()
        pairs = zip(start.parameters(), stored.parameters(), strict=True)
        shift = sum((one - other.float()).mean().item() for one, other in pairs) / 4
        assert shift == pytest.approx(0.03, rel=0.1), "the mean goes where float32 goes"
        ends.append(stored)
    assert_same(*ends)


def test_groups_joined_later():
    models = twins()[:2]
    optimizers = [AdamW([{"params": model[0].parameters(), "lr": 1e-3}], lr=1e-2) for model in models]
    for number in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            if number == 5:
                optimizer.add_param_group({"params": model[2].parameters(), "weight_decay": 0.1})
        step(number, models, optimizers)
    assert_same(*models)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_add_up_in_float32(set_to_none):
    (_, stored), (_, optimizer) = stepped_twins(lambda p: SGD(p, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for scale in (1.0, 2.0**-9):
            (stored[0].weight.sum() * scale).backward()
        kept = stored[0].weight.grad
        assert kept.dtype is torch.float32
        assert (kept == 1 + 2.0**-9).all(), "lost in bfloat16"
        optimizer.step()
        assert stored[0].weight.grad is kept


def tied(first, second):
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})


def test_tied_weights_are_stored_if_all_uses_are_cast():
    assert len(store_weights(tied(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)))) == 0
    model = tied(nn.Linear(4, 5, bias=False), nn.Linear(4, 5, bias=False))
    assert len(store_weights(model)) == 1
    state = model.state_dict()
    assert state["first.weight"] is state["second.weight"], "safetensors looks for shared memory"
    assert model.state_dict()["first.weight"] is not state["first.weight"], "a new one each time"
    with in_fp32(model):
        assert model["second"].weight is model["first"].weight
        assert model["second"].weight.dtype is torch.float32
    assert model["first"].weight.dtype is torch.bfloat16


def test_sparse_gradients():
    models = twins("bf16-true", lambda: network()[:0].append(nn.Embedding(6, 3, sparse=True)))[:2]
    optimizers = [torch.optim.SparseAdam(model.parameters()) for model in models]
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.tensor([1, 3, 3])).sum().backward()
            optimizer.step()
    assert_same(*models)


def test_one_optimizer_of_two_stored_models():
    references, models, fresh = (nn.ModuleList([network(seed), network(seed + 1)]) for seed in (0, 0, 2))
    for model in (*models, *fresh):
        store_weights(model)
    optimizers = [AdamW(pair.parameters(), lr=1e-3) for pair in (references, models, fresh)]
    train((references, models), optimizers[:2], 10)
    for model, other in zip(fresh, models, strict=True):
        model.load_state_dict(other.state_dict())
    store_weights(fresh[0], optimizers[2])
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    train((references, models, fresh), optimizers, 10, first=10)
    assert_same(references, models)
    assert_same(references, fresh)


@pytest.mark.parametrize(
    "make", [lambda params: SGD(params, 0.1, momentum=0.9), lambda params: AdamW(params, 1e-3)]
)
def test_one_optimizer_of_models_in_two_forms_through_the_scaler(make):
    pairs = [nn.ModuleList([network(0), network(1)]) for _ in range(2)]
    optimizers = [make(pair.parameters()) for pair in pairs]
    for model, weights in zip(pairs[1], ("bf16", "fp16"), strict=True):
        store_weights(model, optimizers[1], weights=weights)
    for number in range(5):
        give_gradients(number, *pairs)
        for optimizer in optimizers:
            GradScaler("cpu", enabled=False).step(optimizer)
    assert_same(*pairs)


def test_a_parameter_of_two_models_and_two_optimizers():
    def pair():
        shared = network(0)[0]
        return nn.ModuleList([nn.ModuleList([shared, network(seed)[0]]) for seed in (1, 2)])

    references, models = pair(), pair()
    optimizers = [SGD(model.parameters(), lr=1e-4) for model in (*references, *models)]
    for model, optimizer in zip(models, optimizers[2:], strict=True):
        store_weights(model, optimizer)
    train((references, models), optimizers, 20)
    assert_same(references, models)


def test_an_exception_in_a_step_leaves_what_torch_leaves():
    models, optimizers = stepped_twins(lambda p: Decays(p, KeyError("out of memory")))
    for number in range(3):
        give_gradients(number, *models)
        for optimizer in optimizers:
            with pytest.raises(KeyError):
                optimizer.step()
        assert_same(*models)
    optimizers[1].error = optimizers[0].error = None
    train(models, optimizers, 2)
    assert models[1][0].weight.dtype is torch.bfloat16
    assert_same(*models)
    give_gradients(9, *models)
    for optimizer in optimizers:
        optimizer.error = KeyError("out of memory")
        with pytest.raises(KeyError):
            optimizer.step()
    restore_weights(models[1])  # with float32 weights still in place
    assert type(models[1][0].weight) is nn.Parameter
    assert_same(*models)


def test_state_in_16_bits_is_an_error_before_anything_is_written():
    model = network().bfloat16()
    optimizer = AdamW(model.parameters())
    step(0, (model,), [optimizer])
    with pytest.raises(ValueError, match=r"state 'exp_avg' of this AdamW is in torch.bfloat16"):
        store_weights(model, optimizer)
    _, stored, _ = twins()
    late, before = SGD(stored.parameters(), lr=1.0, momentum=0.9), copy.deepcopy(stored)
    late.state[stored[0].weight]["momentum_buffer"] = torch.rand(9, 7).bfloat16()
    give_gradients(0, stored)
    with pytest.raises(ValueError, match="the state 'momentum_buffer' of this SGD is in torch.bfloat16"):
        late.step()
    assert_same(stored, before)


@pytest.mark.parametrize(("weights", "error"), [("bf16", 2.0**-8), ("fp16", 0.0)])
def test_a_weight_that_somebody_else_writes_is_what_was_written(weights, error):
    """A pair keeps the old low half, which changes the value by at most half of bfloat16's last place."""
    _, stored, _ = twins(weights)
    with torch.no_grad():
        stored[0].weight.fill_(0.5)
        stored[2].weight.data.fill_(0.25)  # no version counter changes
    for name, value in (("0.weight", 0.5), ("2.weight", 0.25)):
        assert ((stored.state_dict()[name] - value).abs() <= error * value).all()
        assert (stored.get_parameter(name) == value).all()


class Lookahead(Optimizer):
    """A wrapper that does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer, **_):
        for name in ("param_groups", "state", "defaults"):
            setattr(self, name, getattr(optimizer, name))


class LOMO(SGD):
    """An optimizer that steps during the backward pass, in hooks on its parameters."""

    fused_backward = None  # the method by which LOMO optimizers are called

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", [Lookahead, library("pytorch_optimizer", "Lookahead")])
@pytest.mark.parametrize("lomo", [LOMO, library("pytorch_optimizer", "LOMO")])
def test_what_never_steps_stored_weights_is_refused_with_the_way_out(wrapper, lomo):
    _, stored, store = twins()
    with pytest.raises(TypeError, match=r"Lookahead .*without Optimizer.__init__.*pass the optimizer"):
        store.add(wrapper(SGD(stored.parameters(), lr=0.1), k=3))
    with pytest.raises(TypeError, match=r"LOMO steps in backward.*weights='fp32'"):
        store.add(lomo(stored, lr=1e-3))
    plain = network()
    for optimizer in (wrapper(SGD(plain.parameters(), lr=0.1), k=3), lomo(plain, lr=1e-3)):
        store_weights(plain, optimizer, weights="fp32")
        add_optimizer(optimizer, "fp32")  # as the adapters do


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("make", [SGD, library("pytorch_optimizer", "AdaHessian")])
def test_gradients_with_a_graph_are_refused_with_the_way_out(make):
    (_, stored), (_, optimizer) = stepped_twins(lambda p: make(p, lr=0.1))
    loss_of(stored).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*weights='fp32'"):
        optimizer.step()
    stored.zero_grad()


def scaled_run(make, weights, in_step):
    """Return all weights after each of 12 steps, two of which are skipped."""
    model = network().half().float()
    optimizer = make(model.parameters())
    store_weights(model, optimizer, weights=weights)
    scaler, trail = GradScaler("cpu", init_scale=2.0**10), [exact(model)]
    for number in range(12):
        loss = sum((p.float() * (1 + i)).sum() for i, p in enumerate(model.parameters()))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number in {4, 5}:
            next(model.parameters()).grad[0, 0] = torch.inf
        if in_step:
            scaler.clip_and_step(optimizer, 1.0)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        trail.append(exact(model))
        same = all(map(torch.equal, *(weights.values() for weights in trail[-2:])))
        assert scaler.last_step(optimizer).skipped is same is (number in {4, 5}), (
            "a skip changes neither half"
        )
    return trail


SCALED = {
    "in the step": (lambda p: AdamW(p, fused=True), True),
    "fused": (lambda p: AdamW(p, fused=True), False),
    "in the step-SGD": (lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), True),
    "plain": (torch.optim.RMSprop, False),
}


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SCALED)
def test_overflows_are_skipped_and_clipping_is_the_same(name, weights):
    make, in_step = SCALED[name]
    ours, reference = scaled_run(make, weights, in_step), scaled_run(make, "fp32", in_step)
    torch.testing.assert_close(ours, reference, rtol=2.0**-22, atol=1e-8)


def test_an_overflow_within_a_closure_restores_both_halves():
    (_, stored), (_, optimizer) = stepped_twins(lambda p: torch.optim.LBFGS(p, max_iter=5))
    scaler, before, seen = GradScaler("cpu", init_scale=4.0), network(), []

    def closure():
        seen.append(exact(stored)["0.weight"])
        optimizer.zero_grad()
        loss = loss_of(stored)
        scaler.scale(loss).backward()
        if len(seen) == 4:
            stored[0].weight.grad.fill_(torch.nan)
        return loss

    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).skipped
    assert not torch.equal(seen[-1], before[0].weight), "the step had changed weights by then"
    assert_same(stored, before)


def test_adding_twice_is_adding_once_and_nothing_is_kept_alive():
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0)
    store = store_weights(model, optimizer)
    store.add(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    step(0, (model,), [optimizer])
    gone = [weakref.ref(owner) for owner in (model, optimizer, store)]
    del model, optimizer, store
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_scheduler_made_before_or_after_storing(is_made_before):
    """Torch warns if a scheduler steps before its optimizer has stepped. No warning may come here."""
    models = network(), network()
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in optimizers if is_made_before]
    store_weights(models[1], optimizers[1])
    schedulers = schedulers or [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for number in range(3):
        step(number, models, optimizers)
        for scheduler in schedulers:
            scheduler.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.125] * 2
    assert_same(*models)


class KeepsAll(AdamW):
    """An optimizer whose state dict contains all its attributes, including hooks."""

    def __getstate__(self):
        return self.__dict__.copy()


def test_a_copy_of_an_optimizer_goes_on_and_one_with_its_model_does_in_float32():
    (reference, stored), (theirs, ours) = stepped_twins(KeepsAll)
    train((reference, stored), (theirs, copy.copy(ours)), 4)
    assert_same(reference, stored)
    others, other = copy.deepcopy((ours, stored))
    assert others.param_groups[0]["params"][0] is other[0].weight
    assert type(other[0].weight) is nn.Parameter
    train((stored, other), (ours, others), 8)
    assert_same(stored, other)


class WithoutLoadHooks(AdamW):
    """An optimizer that overrides load_state_dict, as bitsandbytes' optimizers do."""

    def load_state_dict(self, state_dict, move_to_device=True):
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            param = params[number]
            self.state[param] = {
                name: value.to(param.dtype) if name != "step" else value.clone()
                for name, value in state.items()
            }
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [WithoutLoadHooks, *(library("bitsandbytes.optim", n) for n in ("AdamW32bit", "AdamW8bit", "Lion32bit"))],
)
def test_optimizers_that_load_without_hooks(make):
    assert_steps_and_resumes(make)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_checkpoint_saves_and_sets_all_state():
    def resume(saved, resumed):
        model, optimizer = copy.deepcopy(get_state_dict(*saved))
        set_state_dict(*resumed, model_state_dict=model, optim_state_dict=optimizer)

    assert_steps_and_resumes(AdamW, resume)


def test_a_compiled_step_is_that_of_float32_weights():
    """It may differ from the eager step: torch 2.11's Dynamo replaces ``add_(grad, alpha=-lr)`` by
    ``add_(mul(grad, -lr))``.
    """
    models, optimizers = stepped_twins(lambda p: SGD(p, lr=1e-3))
    compiled = [torch.compile(optimizer.step, backend="eager") for optimizer in optimizers]
    for number in range(3):
        give_gradients(number, *models)
        for step_ in compiled:
            step_()
        assert_same(*models)
    torch._dynamo.reset()
