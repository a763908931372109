"""Is a step in one pass that of the optimizer's own class, for every class that has a rule?"""

import copy

import pytest
import torch

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.one_pass import RULES, why_not

pytestmark = pytest.mark.native

SHAPES = [(16, 64), (1024,)]  # whole vectors: behind them torch's compiler fuses other products

TORCH = {
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {},
    "RMSprop with momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop centered": {"centered": True, "maximize": True},
    "RMSprop centered with momentum": {"centered": True, "momentum": 0.5},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "NAdam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    "RAdam": {"weight_decay": 0.1},
    "RAdam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adamax": {"weight_decay": 0.1},
}
"""The class comes first in a name."""


def of_torch(name, params):
    return getattr(torch.optim, name.split()[0])(params, lr=0.01, foreach=True, **TORCH[name])


def lion(params):
    return pytest.importorskip("lion_pytorch").Lion(params, lr=0.01, weight_decay=0.1)


def schedule_free(params):
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(
        params, lr=0.01, weight_decay=0.1, warmup_steps=5
    )
    made.train()
    return made


OTHERS = {"Lion": lion, "AdamWScheduleFree": schedule_free}
ALL = [*TORCH, *OTHERS]


def make(name, params):
    return OTHERS[name](params) if name in OTHERS else of_torch(name, params)


class Side:
    """Parameters, an optimizer, and a scaler that steps it in one pass or leaves it to its own class."""

    def __init__(self, name, *, one_pass, scale=8.0):
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = make(name, self.params)
        self.scaler = GradScaler("cpu", init_scale=scale, one_pass=one_pass)

    def start_from(self, other):
        for param, value in zip(self.params, other.params, strict=True):
            param.data.copy_(value.data)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def step(self, seed, factor=1.0):
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        loss = sum((p * torch.randn(p.shape, generator=generator) * factor).sum() for p in self.params)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.last_step(self.optimizer)

    def tensors(self):
        """All that a step changes."""
        states = [value for param in self.params for value in self.optimizer.state[param].values()]
        return [*(param.detach() for param in self.params), *states]

    def numbers(self):
        """What a step changes in the groups."""
        groups = self.optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]


@pytest.fixture
def exact_roots(monkeypatch):
    """Square roots that are rounded to nearest: those of MKL, which torch takes, are off by one in 0.6 % of cases."""

    def root(tensor):
        return tensor.double().sqrt().to(tensor.dtype)

    def sqrt(tensors):
        return [root(tensor) for tensor in tensors]

    def sqrt_(tensors):
        torch._foreach_copy_(tensors, sqrt(tensors))

    monkeypatch.setattr(torch, "_foreach_sqrt", sqrt)
    monkeypatch.setattr(torch, "_foreach_sqrt_", sqrt_)


@pytest.mark.parametrize("name", [name for name in ALL if name != "SGD"])
def test_each_step_has_the_bits_of_its_own_class(name, exact_roots):
    """From the same start each time. Adam, AdamW and SGD have those of the fused step, by one last place."""
    ours = Side(name, one_pass=True)
    ours.step(0)
    for seed in range(1, 12):  # RAdam changes its formula at the sixth
        theirs = Side(name, one_pass=False)
        theirs.start_from(ours)
        assert ours.step(seed).one_pass, ours.scaler.last_step(ours.optimizer).not_one_pass_because
        assert not theirs.step(seed).one_pass
        is_fused = name.split()[0] in {"Adam", "AdamW", "Adagrad"}
        for mine, right in zip(ours.tensors(), theirs.tensors(), strict=True):
            if is_fused:
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(mine, right)
        assert ours.numbers() == theirs.numbers()


@pytest.mark.parametrize("name", ALL)
def test_a_poisoned_batch_changes_nothing(name):
    side = Side(name, one_pass=True)
    side.step(0), side.step(1)
    tensors, numbers = copy.deepcopy((side.tensors(), side.numbers()))
    assert side.step(2, torch.inf).skipped
    assert side.scaler.last_step(side.optimizer).one_pass
    assert all(map(torch.equal, side.tensors(), tensors))
    assert side.numbers() == numbers


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16"])
@pytest.mark.filterwarnings("ignore:AdamWScheduleFree keeps 'z' in float32")
def test_stored_weights_and_compressed_states_are_stepped_in_one_pass(name, state, weights):
    """And learn as torch's own step does, on float32."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 16)
    twin = copy.deepcopy(model)
    optimizer, other = make(name, model.parameters()), make(name, twin.parameters())
    store_weights(model, optimizer, weights=weights, state=state)
    scaler = GradScaler("cpu", enabled=False)
    for seed in range(6):
        for network, its_optimizer in ((model, optimizer), (twin, other)):
            torch.manual_seed(seed)
            for param in network.parameters():
                param.grad = torch.randn(param.shape).to(param.dtype)
            scaler.step(its_optimizer)
    assert scaler.last_step(optimizer).one_pass, scaler.last_step(optimizer).not_one_pass_because
    for mine, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), right, rtol=0.02, atol=0.02)


def test_a_class_that_changes_the_step_is_not_taken_for_its_base(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(2))]
    cls = pytest.importorskip("lion_pytorch").Lion

    class Changed(cls):
        pass

    assert not why_not(cls(params))
    assert "there is no rule for the class" in why_not(Changed(params))
    assert why_not(cls(params, decoupled_weight_decay=True)) == "decoupled_wd=True"
    other = cls(params)
    other.defaults["cautious_factor"] = 0.5  # as a later release might
    assert why_not(other) == "its option cautious_factor is not known"
    monkeypatch.setattr(cls, "step", lambda self, closure=None: None)
    assert why_not(cls(params)) == "its step was replaced"


def test_every_row_is_of_a_class_that_is_tested():
    tested = {type(make(name, [torch.nn.Parameter(torch.ones(2))])) for name in ALL}
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in tested}
    assert {row for row in RULES if not row.startswith("timm")} == names
