"""Steps that are undone on the device: the same bits as steps that wait for the flag."""

import math

import pytest
import torch

from amp_plugin import GradScaler

OPTIMIZERS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_equal_to_the_synced_path_bit_for_bit(cls, options):
    ends = []
    for sync_free in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = cls(model.parameters(), lr=0.1, **options)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2, sync_free=sync_free)
        for x in (1.0, math.inf, 2.0, math.nan, math.inf, 3.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 4), x)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        ends.append([*model.parameters(), *state])
        assert scaler.skipped_steps() == 3
    assert all(map(torch.equal, *ends))


def test_a_skipped_first_step_leaves_no_state():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", sync_free=True)
    scaler.scale(model(torch.full((1, 2), math.inf)).sum()).backward()
    scaler.step(optimizer)
    assert not optimizer.state


class HalvesItsRate(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] /= 2


class MakesStateLater(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["late"] = torch.zeros_like(p)


@pytest.mark.parametrize(
    ("cls", "text"),
    [(HalvesItsRate, "HalvesItsRate changes 'lr' in param_groups"), (MakesStateLater, "'late' in the state")],
)
def test_steps_that_cannot_be_undone_are_refused(cls, text):
    model = torch.nn.Linear(2, 1)
    optimizer = cls(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", sync_free=True)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match=f"{text}.*pass sync_free=False"):
        scaler.step(optimizer)


def test_no_host_sync_where_torch_needs_one(forbid_host_syncs):
    model = torch.nn.Linear(2, 1)
    options = {"lr": torch.tensor(0.1), "capturable": False, "foreach": True}
    optimizer = torch.optim.Adadelta(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # makes the state

    def iterate(scaler):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        with forbid_host_syncs():
            scaler.step(optimizer)
            scaler.update()

    iterate(GradScaler("cpu", sync_free=True))
    with pytest.raises(AssertionError, match="a host sync"):
        iterate(torch.amp.GradScaler("cpu"))


def test_state_that_is_no_tensor_is_refused():
    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1

    model = torch.nn.Linear(2, 1)
    optimizer = Counts(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", sync_free=True)
    optimizer.state[model.weight]["steps"] = 1
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match="state 'steps' of Counts is a int, .* sync; pass sync_free=False"):
        scaler.step(optimizer)
    optimizer.defaults["capturable"] = False  # as of Adam
    with pytest.raises(RuntimeError, match="pass capturable=True to the optimizer, or sync_free=False"):
        scaler.step(optimizer)
