"""Habits of Accelerate's users that have little to do with numbers: copies, pickles, private names."""

import copy
import pickle

import accelerate
import pytest
import torch
from accelerate import Accelerator

from amp_plugin import AmpAccelerator
from amp_plugin.adapters.accelerate import install, uninstall
from tests.adapters.accelerate_pair import ours, reset


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    uninstall()
    reset()


class Subclass(Accelerator):
    """A program's own accelerator."""


class SubclassOfOurs(AmpAccelerator):
    """A program's own accelerator."""


def trained(accelerator):
    """Return what an accelerator has prepared, after some steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.DataLoader(torch.ones(4, 2))
    prepared = model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return prepared


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("way", [pickled, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("kind", ["ours", "subclass of ours", "installed", "installed subclass"])
def test_an_accelerator_and_what_it_prepared_are_copied(kind, way, precision):
    reset()
    if kind.startswith("installed"):
        install()
    kinds = {"ours": AmpAccelerator, "subclass of ours": SubclassOfOurs, "installed": accelerate.Accelerator}
    cls = kinds.get(kind, Subclass)
    accelerator = cls(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    prepared = trained(accelerator)
    for thing in prepared:
        way(thing)
    twin = way(accelerator)
    assert type(twin) is type(accelerator)
    assert isinstance(twin, AmpAccelerator)
    assert (twin.scaler is None) == (precision != "fp16")
    trained(twin)


def test_a_pickled_accelerator_trains_on_with_its_optimizer():
    accelerator = ours(init_scale=8.0, growth_interval=1, exact_schedulers=True)
    model, optimizer, scheduler, _ = trained(accelerator)
    twin, model, optimizer, scheduler = pickled((accelerator, model, optimizer, scheduler))
    assert optimizer.scaler is twin.scaler
    before = twin.scaler.get_scale(), model.weight.detach().clone()
    twin.backward(model(torch.ones(1, 2)).sum())
    assert twin.clip_grad_norm_(model.parameters(), 10.0) == pytest.approx(3**0.5)
    optimizer.step()
    twin.backward(model(torch.ones(1, 2)).sum())
    assert twin.scaler.get_scale() == 2 * before[0]
    torch.testing.assert_close(model.weight.detach(), before[1] - optimizer.param_groups[0]["lr"])
    assert twin.last_step(optimizer).skipped is False


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_who_sets_is_overflow_holds_the_scheduler_back(precision):
    accelerator = ours(precision=precision)
    _, optimizer, scheduler, _ = trained(accelerator)
    rates = scheduler.get_last_lr()
    for overflow in (True, False):
        optimizer._is_overflow = overflow
        assert optimizer.step_was_skipped is overflow
        assert accelerator.optimizer_step_was_skipped is overflow
        scheduler.step()
        rates = [*rates, *scheduler.get_last_lr()]
    assert rates == pytest.approx([rates[0], rates[0], 0.9 * rates[0]])


def test_a_step_of_ours_decides_anew():
    accelerator = ours()
    model, optimizer, _, _ = trained(accelerator)
    optimizer._is_overflow = True
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert optimizer.step_was_skipped is False
