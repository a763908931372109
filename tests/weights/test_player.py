"""A random player: stores, steps, edits, saves, loads, converts, copies and thaws a model and its fp32 twin alike."""

import copy
import operator
import pickle
import random

import pytest
import torch
from torch import nn

from amp_plugin import restore_weights, store_weights
from amp_plugin.weights.store import in_fp32
from tests.weights.twins import exact

WAYS = ["bf16", "fp16", "bf16-true", "fp16-true", "fp32"]
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "SGD-foreach": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.first, self.second, self.conv = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(2, 3, 1)
        self.second.weight = self.first.weight
        self.recurrent = nn.GRU(2, 3)


class Player:
    """Plays one sequence of moves on a model and its fp32 twin; says which when they differ."""

    def __init__(self, seed):
        self.random, self.moves, self.count = random.Random(seed), [], 0
        torch.manual_seed(seed)
        self.twin = Net()
        self.model = copy.deepcopy(self.twin)
        self.kind = self.random.choice(list(OPTIMIZERS))
        self.way, self.saved = "fp32", None
        self.optimizers = [OPTIMIZERS[self.kind](m.parameters()) for m in (self.twin, self.model)]
        self.store()

    @property
    def models(self):
        return self.twin, self.model

    def play(self, moves):
        names = ["step"] * 4 + [
            "store", "give_gradients", "edit_nothing", "set_to_zero", "edit_in_fp32", "save", "load", "load_into_new",
            "assign", "copied", "pickled", "freeze", "new_optimizer", "step_in_fp32", "closure", "fail", "restore",
            "to_memory_format", "share",
        ]  # fmt: skip
        for _ in range(moves):
            name = self.random.choice(names)
            self.moves.append(name)
            getattr(self, name)()
            self.compare()

    def compare(self):
        states = [model.state_dict() for model in self.models]
        assert states[0].keys() == states[1].keys(), self.moves
        for name, value in states[0].items():
            assert states[1][name].dtype is torch.float32, (name, self.moves)
            assert torch.equal(value, states[1][name]), (name, self.kind, self.way, self.moves)
        assert self.model.first.weight is self.model.second.weight
        recurrent = self.model.recurrent
        assert all(map(operator.is_, recurrent._flat_weights, recurrent.parameters())), self.moves

    def give_gradients(self):
        self.count += 1
        for model in self.models:
            generator = torch.Generator().manual_seed(self.count)
            for param in model.parameters():
                grad = torch.randn(param.shape, generator=generator)
                if param.requires_grad:
                    param.grad = grad if param.grad is None else param.grad + grad

    def both(self, call):
        for model in self.models:
            with torch.no_grad():
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
        self.saved = (
            copy.deepcopy([part.state_dict() for part in (self.twin, self.model, *self.optimizers)]),
            self.kind,
        )

    def load(self):
        if self.saved is not None and self.saved[1] == self.kind:
            store_weights(self.model, self.optimizers[1], weights=self.way)  # or its state may be refused
            order = self.random.sample(range(4), 4)
            for number in order:
                parts = (self.twin, self.model, *self.optimizers)
                parts[number].load_state_dict(copy.deepcopy(self.saved[0][number]))

    def load_into_new(self):
        state, optimizer_state = self.model.state_dict(), copy.deepcopy(self.optimizers[1].state_dict())
        frozen = [not param.requires_grad for param in self.model.parameters()]
        self.model = Net()
        self.optimizers[1] = OPTIMIZERS[self.kind](self.model.parameters())
        self.store()
        for param, is_frozen in zip(self.model.parameters(), frozen, strict=True):
            param.requires_grad_(not is_frozen)
        self.model.load_state_dict(state)
        self.optimizers[1].load_state_dict(optimizer_state)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def assign(self):
        for model in self.models:
            model.load_state_dict(exact(model), assign=True)
            model.second.weight = model.first.weight
        self.new_optimizer()

    def copied(self):
        self.replace_by(copy.deepcopy)

    def pickled(self):
        self.replace_by(lambda pair: pickle.loads(pickle.dumps(pair)))

    def replace_by(self, way):
        pairs = [way(pair) for pair in zip(self.models, self.optimizers, strict=True)]
        (self.twin, self.model), self.optimizers = zip(*pairs, strict=True)
        self.optimizers = list(self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
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
        self.kind = self.random.choice(list(OPTIMIZERS))
        self.optimizers = [OPTIMIZERS[self.kind](model.parameters()) for model in self.models]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.kind == "Adagrad" or self.random.random() < 0.5:  # its constructor makes state
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

    def to_memory_format(self):
        self.both(lambda model: model.to("cpu", non_blocking=True))

    def share(self):
        self.model.share_memory()


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.whole_run) for n in range(2, 25))]
)
def test_it_finds_nothing(part):
    for seed in range(200 * part, 200 * (part + 1)):
        player = Player(seed)
        try:
            player.play(12)
        except Exception as error:
            error.add_note(f"seed {seed}, {player.kind}, {player.way}: {player.moves}")
            raise
