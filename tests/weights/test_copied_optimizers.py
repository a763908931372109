"""Copies and pickles of an optimizer whose weights are stored: they step masters too."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from amp_plugin import store_weights
from amp_plugin.weights.optimizer_view import view_of
from tests.weights.test_store import assert_same, exact, give_gradients, go_on, network, trained


class KeepsAll(torch.optim.AdamW):
    """An optimizer whose state is all that it has, hooks included."""

    def __getstate__(self):
        return self.__dict__.copy()


def saved_and_loaded(things):
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda things: pickle.loads(pickle.dumps(things)),
    "pickle, protocol 2": lambda things: pickle.loads(pickle.dumps(things, protocol=2)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("weights", ["bf16", "fp16", "bf16-stochastic"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [torch.optim.AdamW, KeepsAll])
def test_a_copy_with_its_model_goes_on_bit_for_bit(way, weights, make):
    model, optimizer, _ = trained(weights, make=make)
    others, other = WAYS[way]((optimizer, model))
    assert type(others) is make
    assert others.param_groups[0]["params"][0] is other[0].weight
    for run in ((model, optimizer), (other, others)):
        go_on(*run, 5, 12)
    assert_same(model, other)
    assert others.param_groups[0]["params"][0] is other[0].weight, "and gives masters back"
    again, model_again = WAYS[way]((others, other))
    for run in ((other, others), (model_again, again)):
        go_on(*run, 12, 15)
    assert_same(other, model_again)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_alone_keeps_what_makes_its_weights_exact(way):
    model, optimizer, store = trained()
    twin = WAYS[way](optimizer)
    rests, twins = (stepped.state_dict()["amp_plugin_weights"]["rests"] for stepped in (optimizer, twin))
    assert all(torch.equal(rests[number], twins[number]) for number in rests)
    give_gradients(5, model)
    optimizer.step()
    for number, param in enumerate(twin.param_groups[0]["params"]):
        param.grad = list(model.parameters())[number].grad.clone()
    twin.step()
    entry = twin.state_dict()["amp_plugin_weights"]
    for number, weight in enumerate(store):
        assert torch.equal(entry["rests"][number], weight.rest)


def test_a_shallow_copy_steps_the_same_masters():
    model, optimizer, _ = trained(make=torch.optim.SGD)
    reference, references, _ = trained(make=torch.optim.SGD)
    twin = copy.copy(optimizer)
    go_on(model, twin, 5, 8)
    go_on(reference, references, 5, 8)
    assert_same(model, reference)


def test_a_copy_without_it_would_lose_updates():
    model, optimizer, _ = trained(steps=0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    other, others = copy.deepcopy((model, optimizer))
    before = {name: value.clone() for name, value in exact(other).items()}
    go_on(other, others, 0, 1)
    assert all((exact(other)[name] != value).any() for name, value in before.items())


def test_schedulers_go_with_the_copy():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    store_weights(model, optimizer)
    scheduler = StepLR(optimizer, 1, 0.5)
    others, late = copy.deepcopy((optimizer, scheduler))
    assert late.optimizer is others
    assert view_of(others) is not None


def test_an_optimizer_that_was_copied_is_freed():
    _, optimizer, _ = trained()
    twin = copy.deepcopy(optimizer)
    gone = [weakref.ref(optimizer), weakref.ref(twin)]
    del optimizer, twin
    gc.collect()
    assert [ref() for ref in gone] == [None] * 2
