"""Optimizers that were not handed to the store of the weights that they step."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers.optimization import Adafactor as TransformersAdafactor

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.late_optimizers import LateOptimizers
from amp_plugin.weights.optimizer_view import view_of
from amp_plugin.weights.weight_store import store_of
from tests.weights.test_optimizers import assert_same, give_gradients, network, pair

WARNING = "SGD steps weights that are stored in 16 bits, and was not handed to their store: it is now"
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-5),
    "transformers-Adafactor": lambda p: TransformersAdafactor(p, lr=1e-5, relative_step=False),
}
GUARD = GradScaler("cpu", enabled=False)
STEPS = {"plain": lambda optimizer: optimizer.step(), "scaler": GUARD.step}


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_masters_from_its_first_step_on_and_one_warning_says_so(name, step, weights):
    reference, stored, store = pair(weights)
    plain, late = OPTIMIZERS[name](reference.parameters()), OPTIMIZERS[name](stored.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            give_gradients(number, reference, stored)
            STEPS[step](plain)
            STEPS[step](late)
    assert_same(store, stored, reference)
    assert [str(warning.message).partition(" ")[2].partition(" that")[0] for warning in caught] == [
        "steps weights"
    ]
    assert caught[0].filename == __file__


def test_state_in_16_bits_is_an_error_before_anything_is_written():
    _, stored, store = pair()
    early = torch.optim.SGD(stored.parameters(), lr=1.0, momentum=0.9)
    give_gradients(0, stored)
    with pytest.warns(UserWarning, match=WARNING):
        early.step()
    late = torch.optim.SGD(stored.parameters(), lr=1.0, momentum=0.9)
    late.load_state_dict(early.state_dict())
    before = list(store.fp32_state_dict(stored).values())
    with pytest.raises(ValueError, match="the state 'momentum_buffer' of this SGD is in torch.bfloat16"):
        late.step()
    assert all(map(torch.equal, store.fp32_state_dict(stored).values(), before))


def test_optimizers_of_other_weights_step_as_before():
    _, stored, _ = pair()
    other = network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    give_gradients(0, other, stored)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).one_pass
    assert view_of(optimizer) is None
    assert not optimizer._optimizer_step_pre_hooks


def test_a_compiled_step_of_other_weights_is_left_alone():
    _, stored, _ = pair()
    other = network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, foreach=True)
    give_gradients(0, other, stored)
    before = [param.detach().clone() for param in other.parameters()]
    torch.compile(optimizer.step, backend="eager")()
    assert not any(map(torch.equal, other.parameters(), before))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_it_is_so_of_a_copied_model_too(copied):
    _, stored, _ = pair()
    model = copied(stored)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    give_gradients(0, model)
    with pytest.warns(UserWarning, match=WARNING):
        optimizer.step()
    assert view_of(optimizer) is not None
    assert store_of(model).has(model[0].weight)


def test_nothing_of_it_stays_when_the_model_is_gone():
    def hooks():
        gc.collect()
        return sum(isinstance(hook, LateOptimizers) for hook in _global_optimizer_pre_hooks.values())

    before = hooks()
    model = network()
    store_weights(model)
    assert hooks() == before + 1
    del model
    assert hooks() == before
