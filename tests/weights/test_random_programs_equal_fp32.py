"""Random programs have the same effect on a model with stored weights and on its fp32 twin.

Their operations are: store, step, edit, save, load, unfreeze.
"""

import copy
import operator
import pickle
import random

import pytest
import torch
from torch import nn

from amp_plugin import restore_weights, store_weights
from amp_plugin.weights.store import in_fp32
from amp_plugin.weights.weight import stored_weight
from tests.weights.twins import TORCHS, assert_same, exact

WAYS = ["bf16", "fp16", "bf16-true", "fp16-true", "fp32"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.first, self.second, self.conv = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(2, 3, 1)
        self.second.weight = self.first.weight
        self.recurrent = nn.GRU(2, 3)


class Player:
    """Applies random operations to a model and its fp32 twin. Reports the operations if the two differ."""

    def __init__(self, seed):
        self.random, self.moves, self.count = random.Random(seed), [], 0
        torch.manual_seed(seed)
        self.twin = Net()
        self.model = copy.deepcopy(self.twin)
        self.kind = self.random.choice(list(TORCHS))
        self.way, self.saved = "fp32", None
        self.optimizers = [TORCHS[self.kind](m.parameters()) for m in (self.twin, self.model)]
        self.store()

    @property
    def models(self):
        return self.twin, self.model

    def play(self, moves):
        names = ["step"] * 4 + [
            "store", "give_gradients", "edit_nothing", "set_to_zero", "edit_in_fp32", "save", "load", "load_into_new",
            "assign", "copied", "freeze", "new_optimizer", "step_in_fp32", "closure", "fail", "restore", "share",
        ]  # fmt: skip
        for _ in range(moves):
            name = self.random.choice(names)
            self.moves.append(name)
            getattr(self, name)()
            self.compare()

    def compare(self):
        assert_same(self.twin, self.model)
        assert self.model.first.weight is self.model.second.weight
        recurrent = self.model.recurrent
        assert all(map(operator.is_, recurrent._flat_weights, recurrent.parameters()))

    def give_gradients(self):
        self.count += 1
        for model in self.models:
            generator = torch.Generator().manual_seed(self.count)
            for param in model.parameters():
                grad = torch.randn(param.shape, generator=generator)
                if param.requires_grad:
                    param.grad = grad if param.grad is None else param.grad + grad

    @torch.no_grad()
    def both(self, call):
        for model in self.models:
            call(model)

    # -- moves

    def step(self):
        self.give_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.count % 2 == 0)

    def store(self):
        self.way = self.random.choice(WAYS)
        store_weights(self.model, self.optimizers[1], weights=self.way)

    def edit_nothing(self):
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-100, 100)
                param.data.mul_(1)
                param.copy_(param.clone())

    def set_to_zero(self):
        if self.random.random() < 0.5:
            self.both(lambda model: model.first.weight.mul_(torch.eye(4)))
        else:
            self.both(lambda model: model.conv.weight.data.zero_())

    def edit_in_fp32(self):
        with in_fp32(self.model), in_fp32(self.model):
            self.both(lambda model: [param.mul_(1.001) for param in model.parameters()])

    def save(self):
        parts = (self.twin, self.model, *self.optimizers)
        self.saved = self.kind, copy.deepcopy([part.state_dict() for part in parts])

    def load(self):
        if self.saved is not None and self.saved[0] == self.kind:
            # otherwise its state may be refused
            store_weights(self.model, self.optimizers[1], weights=self.way)
            loads = list(zip((self.twin, self.model, *self.optimizers), self.saved[1], strict=True))
            for part, state in self.random.sample(loads, 4):
                part.load_state_dict(copy.deepcopy(state))

    def load_into_new(self):
        state, optimizer_state = self.model.state_dict(), copy.deepcopy(self.optimizers[1].state_dict())
        self.model = Net()
        self.optimizers[1] = TORCHS[self.kind](self.model.parameters())
        self.store()
        for param, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            param.requires_grad_(other.requires_grad)
        self.model.load_state_dict(state)
        self.optimizers[1].load_state_dict(optimizer_state)
        self.forget_gradients()

    def forget_gradients(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def assign(self):
        for model in self.models:
            model.load_state_dict(exact(model), assign=True)
            model.second.weight = model.first.weight
        self.new_optimizer()

    def copied(self):
        ways = (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)))
        pairs = map(self.random.choice(ways), list(zip(self.models, self.optimizers, strict=True)))
        (self.twin, self.model), self.optimizers = map(list, zip(*pairs, strict=True))
        self.forget_gradients()
        self.maybe_store()

    def maybe_store(self):
        if self.random.random() < 0.7:
            self.store()

    def freeze(self):
        frozen = self.random.random() < 0.5
        for model in self.models:
            model.first.requires_grad_(not frozen)
            model.first.weight.grad = model.first.bias.grad = None

    def new_optimizer(self):
        self.kind = self.random.choice(list(TORCHS))
        self.optimizers = [TORCHS[self.kind](model.parameters()) for model in self.models]
        self.forget_gradients()
        if self.kind == "Adagrad" or self.random.random() < 0.5:
            store_weights(self.model, self.optimizers[1], weights=self.way)

    def step_in_fp32(self):
        with in_fp32(self.model):
            self.step()
            self.compare()

    def closure(self):
        self.give_gradients()
        for optimizer in self.optimizers:
            optimizer.step(lambda: torch.zeros(()))

    def fail(self):
        def closure():
            raise KeyError

        for optimizer in self.optimizers:
            with pytest.raises(KeyError):
                optimizer.step(closure)

    def restore(self):
        restore_weights(self.model)
        self.maybe_store()

    def share(self):
        self.model.share_memory()
        assert all(
            weight.kept.is_shared() for weight in map(stored_weight, self.model.parameters()) if weight
        )


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.whole_run) for n in range(1, 50))])
def test_it_finds_nothing(part):
    for seed in range(100 * part, 100 * (part + 1)):
        player = Player(seed)
        try:
            player.play(12)
        except Exception as error:
            error.add_note(f"seed {seed}, {player.kind}, {player.way}: {player.moves}")
            raise
