"""What hard use of 0.2 found: each trained wrongly without a word, or raised an error of somebody else's."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer

from amp_plugin import autocast, restore_weights, store_weights
from amp_plugin.weights.optimizer_hooks import accept_entries_of_0_2
from amp_plugin.weights.store import in_fp32
from tests.weights.twins import (
    assert_same,
    assert_steps_and_resumes,
    exact,
    give_gradients,
    network,
    step,
    twins,
)


class Container(Optimizer):
    """An optimizer that steps others, one per parameter, as torchtitan's does."""

    def __init__(self, params):
        params = list(params)
        self.inner = [AdamW([param], lr=1e-3) for param in params]
        super().__init__(params, {})

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


def test_an_optimizer_that_steps_others():
    reference, stored, store = twins()
    optimizers = [Container(model.parameters()) for model in (reference, stored)]
    store.add(optimizers[1], *optimizers[1].inner)
    for number in range(20):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


def test_fp32_blocks_nest_and_an_optimizer_steps_inside():
    reference, stored, store = twins()
    optimizers = [AdamW(model.parameters(), lr=1e-3) for model in (reference, stored)]
    store.add(optimizers[1])
    with in_fp32(stored):
        with in_fp32(stored):
            assert_same(reference, stored)
        assert_same(reference, stored)
        step(0, (reference, stored), optimizers)
        assert_same(reference, stored)
    assert stored[0].weight.dtype is torch.bfloat16
    step(1, (reference, stored), optimizers)
    assert_same(reference, stored)


@pytest.mark.parametrize(("weights", "convert"), [("bf16", "half"), ("fp16", "bfloat16"), ("bf16", "float")])
def test_a_converted_model_is_an_error_at_the_next_use(weights, convert):
    _, stored, store = twins(weights)
    optimizer = SGD(stored.parameters(), lr=0.1)
    store.add(optimizer)
    getattr(stored, convert)()
    give_gradients(0, stored)
    for use in (optimizer.step, stored.state_dict, lambda: restore_weights(stored)):
        with pytest.raises(RuntimeError, match=r"something has converted the model.*restore_weights"):
            use()


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_edits_that_change_nothing_lose_nothing(weights):
    reference, stored, store = twins(weights)
    optimizers = [SGD(model.parameters(), lr=1e-4) for model in (reference, stored)]
    store.add(optimizers[1])
    for number in range(20):
        step(number, (reference, stored), optimizers)
        with torch.no_grad():
            stored[0].weight.clamp_(-10, 10)
            stored[2].weight.copy_(stored[2].weight.clone())
            stored[2].bias.data.mul_(1)
    assert_same(reference, stored)


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_float32_that_is_assigned_as_data_is_stored(weights):
    reference, stored, store = twins(weights)
    optimizers = [SGD(model.parameters(), lr=1e-5) for model in (reference, stored)]
    store.add(optimizers[1])
    values = network(7)
    for model in (reference, stored):
        for param, value in zip(model.parameters(), values.parameters(), strict=True):
            param.data = value.detach().clone()
    for number in range(5):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


def test_weights_that_are_set_to_zero_are_zero():
    _, stored, store = twins()
    optimizer = SGD(stored.parameters(), lr=0.0)
    store.add(optimizer)
    with torch.no_grad():
        stored[0].weight.zero_()
        stored[2].weight.data *= 0.0  # no version moves
    step(0, (stored,), [optimizer])
    for name in ("0.weight", "2.weight"):
        assert (stored.state_dict()[name] == 0).all(), name


def test_one_optimizer_of_two_stored_models():
    references, models = ([network(seed) for seed in (0, 1)] for _ in range(2))
    for model in models:
        store_weights(model)
    optimizers = [
        AdamW([*pair[0].parameters(), *pair[1].parameters()], lr=1e-3) for pair in (references, models)
    ]
    for number in range(10):
        step(number, (*references, *models), optimizers)
    state = copy.deepcopy(optimizers[1].state_dict())
    fresh = [network(seed) for seed in (2, 3)]
    for model, other in zip(fresh, models, strict=True):
        store_weights(model)
        model.load_state_dict(other.state_dict())
    optimizers.append(AdamW([*fresh[0].parameters(), *fresh[1].parameters()], lr=1.0))
    store_weights(fresh[0], optimizers[2])
    optimizers[2].load_state_dict(state)
    for number in range(10, 20):
        step(number, (*references, *models, *fresh), optimizers)
    for reference, model, resumed in zip(references, models, fresh, strict=True):
        assert_same(reference, model)
        assert_same(reference, resumed)


def test_a_parameter_of_two_models_and_two_optimizers():
    class Net(nn.Module):
        def __init__(self, shared, seed):
            super().__init__()
            self.shared, self.own = shared, network(seed)[0]

    def pair():
        shared = network(0)[0]
        return Net(shared, 1), Net(shared, 2)

    references, models = pair(), pair()
    for model in models:
        store_weights(model)
    optimizers = [SGD(model.parameters(), lr=1e-4) for model in (*references, *models)]
    for optimizer, model in zip(optimizers[2:], models, strict=True):
        store_weights(model, optimizer)
    for number in range(20):
        step(number, (*references, *models), optimizers)
    for reference, model in zip(references, models, strict=True):
        assert_same(reference, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_state_dict_assigns(dtype):
    reference, stored, store = twins()
    values = {name: value.to(dtype) for name, value in network(5).state_dict().items()}
    reference.load_state_dict(values)
    stored.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
    optimizers = [SGD(model.parameters(), lr=1e-5) for model in (reference, stored)]
    store.add(optimizers[1])
    for number in range(20):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


@pytest.mark.parametrize("second", ["fp16", "bf16-true", "fp32", "bf16"])
def test_storing_again_in_another_way_keeps_all_bits(second):
    reference, stored, _ = twins()
    optimizers = [SGD(model.parameters(), lr=1e-5) for model in (reference, stored)]
    store_weights(stored, optimizers[1], weights=second)
    assert_same(reference, stored)
    assert stored[0].weight.dtype is {"fp16": torch.float16, "fp32": torch.float32}.get(
        second, torch.bfloat16
    )
    for number in range(10):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


class WithoutLoadHooks(AdamW):
    """Loads a state dict by its own code, as bitsandbytes' optimizers do."""

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


def test_optimizers_that_load_without_hooks():
    assert_steps_and_resumes(WithoutLoadHooks)


class Lookahead(Optimizer):
    """A wrapper that skips ``Optimizer.__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = (
            optimizer.param_groups,
            optimizer.state,
            optimizer.defaults,
        )

    def step(self, closure=None):
        self.optimizer.step()


class LOMO(Optimizer):
    """Steps in backward, by hooks on its parameters."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 1e-3})

    def fused_backward(self, loss, lr):
        """What the LOMO optimizers are called by."""


class Hessian(SGD):
    """Differentiates gradients in its step, as AdaHessian and SophiaH do."""

    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        torch.autograd.grad(
            [param.grad for param in params], params, [torch.ones_like(p.grad) for p in params]
        )


def test_what_cannot_be_exact_is_refused_with_the_way_out():
    _, stored, store = twins()
    with pytest.raises(TypeError, match=r"Lookahead .*without Optimizer.__init__.*hand over the optimizer"):
        store.add(Lookahead(SGD(stored.parameters(), lr=0.1)))
    with pytest.raises(TypeError, match=r"LOMO steps in backward.*weights='fp32'"):
        store.add(LOMO(stored))
    plain = network()
    for optimizer in (Lookahead(SGD(plain.parameters(), lr=0.1)), LOMO(plain)):
        store_weights(plain, optimizer, weights="fp32")
        accept_entries_of_0_2(optimizer)  # what adapters do
    optimizer = Hessian(stored.parameters(), lr=0.1)
    store.add(optimizer)
    loss = stored(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reference cycle
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"Hessian .*create_graph=True.*weights='fp32'"):
        optimizer.step()
    for param in stored.parameters():
        param.grad = None


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(8),
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: _Both(nn.Bilinear(8, 8, 8)),
    ],
    ids=["LayerNorm", "GroupNorm", "TransformerEncoderLayer", "Bilinear"],
)
@pytest.mark.parametrize("training", [True, False])
def test_modules_on_fp32_activations_on_the_cpu(make, training):
    torch.manual_seed(0)
    model = make()
    model = model.train(training)
    plain = copy.deepcopy(model)
    store_weights(model)
    x = torch.randn(3, 8, 8) if isinstance(model, nn.TransformerEncoderLayer) else torch.randn(3, 8)
    outs = []
    for module in (plain, model):
        with autocast("cpu", dtype=torch.bfloat16):
            outs.append(module(x))
        if training:
            outs[-1].float().sum().backward()
    assert torch.equal(*outs)


class _Both(nn.Module):
    def __init__(self, bilinear):
        super().__init__()
        self.bilinear = bilinear

    def forward(self, x):
        return self.bilinear(x, x)


def test_optimizers_that_make_state_in_their_constructor():
    reference, stored, store = twins()
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=1e-3) for model in (reference, stored)]
    store.add(optimizers[1])
    for number in range(10):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_checkpoint_saves_and_sets_all_state():
    def resume(saved, resumed):
        model, optimizer = copy.deepcopy(get_state_dict(*saved))
        set_state_dict(*resumed, model_state_dict=model, optim_state_dict=optimizer)

    assert_steps_and_resumes(AdamW, resume)


def test_a_compiled_step_is_that_of_float32_weights():
    """Not the eager step's: torch 2.11's Dynamo makes ``add_(mul(grad, -lr))`` of ``add_(grad, alpha=-lr)``."""
    reference, stored, store = twins()
    optimizers = [SGD(model.parameters(), lr=1e-3) for model in (reference, stored)]
    store.add(optimizers[1])
    compiled = [torch.compile(optimizer.step, backend="eager") for optimizer in optimizers]
    for number in range(3):
        give_gradients(number, reference, stored)
        for step_ in compiled:
            step_()
        assert_same(reference, stored)
    torch._dynamo.reset()


def test_a_state_dict_is_that_of_an_fp32_model():
    reference, stored, _ = twins()
    assert {value.dtype for value in stored.state_dict().values()} == {torch.float32}
    assert_same(reference, stored)
    other = network(4)
    other.load_state_dict(exact(stored))
    assert_same(reference, other)
