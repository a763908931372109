"""For every optimizer class that has a rule: does a one-pass step give the result of the class's own step?"""

import copy
import importlib
import inspect
import itertools
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_plugin import GradScaler, store_weights
from amp_plugin.weights.compressed_state import fp32_state_dict
from amp_plugin.weights.muon import step_of
from amp_plugin.weights.one_pass import RULES, why_not

pytestmark = pytest.mark.native

# whole vectors, because in the remaining elements the compiler of torch fuses other products
SHAPES = [(16, 64), (64, 32), (1024,)]

TORCH = {
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {},
    "RMSprop with momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop centered": {"centered": True, "maximize": True},
    "RMSprop centered with momentum": {"centered": True, "momentum": 0.5},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1, "maximize": True},
    "NAdam": {"weight_decay": 0.1},
    "NAdam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    "RAdam": {"weight_decay": 0.1},
    "RAdam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adamax": {"weight_decay": 0.1},
}
"""The class comes first in a name."""


def of_torch(name, params):
    return getattr(torch.optim, name.split()[0])(params, lr=0.01, foreach=True, **TORCH[name])


def muon(**options):
    return lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01, **options)


def module_alone(name):
    """Import one module of timm without its packages, which need torchvision.

    `make` installs timm in a separate folder.
    """
    package, *inner = name.split(".")[:-1]
    path = [str(Path(sys.prefix, "apart", package))]
    if not Path(*path).is_dir():
        pytest.skip(f"{package} is not there; make installs it")
    added = {}
    for part in ("", *inner):
        full = ".".join(filter(None, (package, part)))
        added[full] = types.ModuleType(full)
        added[full].__path__ = path = [f"{folder}/{part}" for folder in path]
    before = {full: sys.modules.get(full) for full in added}
    sys.modules.update(added)
    try:
        return importlib.import_module(name)
    finally:
        for full, module in before.items():
            if module is None:
                del sys.modules[full]
            else:
                sys.modules[full] = module


def lion(params):
    return importlib.import_module("lion_pytorch").Lion(params, lr=0.01, weight_decay=0.1)


def lion_of_timm(params):
    return module_alone("timm.optim.lion").Lion(params, lr=0.01, weight_decay=0.1, maximize=True)


def lion_of_pytorch_optimizer(params):
    return importlib.import_module("pytorch_optimizer").Lion(params, lr=0.01, weight_decay=0.1)


def schedule_free(params):
    made = importlib.import_module("schedulefree").AdamWScheduleFree(
        params, lr=0.01, weight_decay=0.1, warmup_steps=5
    )
    made.train()
    return made


OTHERS = {
    "Muon": muon(),
    "Muon without Nesterov": muon(nesterov=False, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    "Lion": lion,
    "Lion of timm": lion_of_timm,
    "Lion of pytorch_optimizer": lion_of_pytorch_optimizer,
    "AdamWScheduleFree": schedule_free,
}
ALL = [*TORCH, *OTHERS]
LERPS = ("Lion of timm", "Lion of pytorch_optimizer")
"""The averages of these are the same but for a rounding: they are moved by a lerp."""


def make(name, params):
    return OTHERS[name](params) if name in OTHERS else of_torch(name, params)


class Side:
    """Parameters, an optimizer, and a scaler that either steps it in one pass or calls its own step."""

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
        """Return all tensors that a step changes."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        states = [value for param in params for value in self.optimizer.state[param].values()]
        return [*(param.detach() for param in self.params), *states]

    def numbers(self):
        """Return the numbers in the parameter groups that a step changes."""
        groups = self.optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]


@pytest.fixture
def exact_roots(monkeypatch):
    """Use correctly rounded square roots. MKL's, which torch uses, are off by one unit in 0.6 % of cases."""

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
    """Each step starts from the same state.

    Adam, AdamW and SGD equal the fused step within one unit in the last place.
    """
    ours = Side(name, one_pass=True)
    ours.step(0)
    for seed in range(1, 12):  # RAdam changes its formula at the sixth step
        theirs = Side(name, one_pass=False)
        theirs.start_from(ours)
        result = ours.step(seed)
        assert result.one_pass, result.how
        assert not theirs.step(seed).one_pass
        is_close = name.split()[0] in {"Adam", "AdamW", "Adagrad"} or name in LERPS
        for mine, right in zip(ours.tensors(), theirs.tensors(), strict=True):
            if is_close:
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


WEIGHTS = ("fp32", "bf16", "fp16", "bf16-stochastic")
STATES = {"fp32": 1e-6, "bf16": 2.0**-7, "8bit": 0.02}
"""How states are stored, and their tolerance: a unit of the format, as a share of the largest."""
MAX_NORM = 0.5


def exact_params(model):
    return [value.clone() for value in model.state_dict().values()]


def in_float64(name, model, optimizer, divisor):
    """Run the step of the optimizer's own class in float64, from the stored values.

    Return parameters and states.
    """
    grads = [param.grad.double() / divisor for param in model.parameters()]
    params = [torch.nn.Parameter(value.double()) for value in exact_params(model)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    twin = make(name, params)
    # otherwise both would count in the same tensor
    twin.load_state_dict(copy.deepcopy(fp32_state_dict(optimizer)))
    total = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
    return params, twin, (MAX_NORM / (total + 1e-6)).clamp(max=1.0)


def largest_difference(mine, right):
    """Return the largest difference, relative to the largest number."""
    return ((mine.double() - right).abs().max() / right.abs().max().clamp(min=1e-12)).item()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:AdamWScheduleFree keeps 'z' in float32")
def test_each_step_is_that_of_its_own_class_in_float64(name):
    """One step from the same numbers, for each storage of weights and states, scaled or not, clipped or not."""
    dim = 2 if name.startswith("Muon") else 1
    for number, (weights, state, scaled, clips) in enumerate(
        itertools.product(WEIGHTS, STATES, (False, True), (False, True))
    ):
        torch.manual_seed(number)
        model = torch.nn.ParameterList([torch.randn(16, 24), torch.randn(*(130, 3)[:dim])])
        optimizer = make(name, model.parameters())
        store_weights(model, optimizer, weights=weights, state=state)
        scaler = GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for step in range(3):
            optimizer.zero_grad()
            loss = sum((param.float() * torch.randn(param.shape)).sum() for param in model.parameters())
            scaler.scale(loss).backward()
            if step == 2:
                params, twin, factor = in_float64(name, model, optimizer, 8.0 if scaled else 1.0)
            scaler.clip_and_step(optimizer, MAX_NORM) if clips else scaler.step(optimizer)
            scaler.update()
        case = f"{name}, weights={weights}, state={state}, scaled={scaled}, clips={clips}"
        result = scaler.last_step(optimizer)
        assert result.one_pass, f"{case}: {result.how}"
        for param in params if clips else ():
            param.grad *= factor
        twin.step()
        coarse = 2.0**-7 if weights == "bf16-stochastic" else 2e-6
        for mine, right in zip(exact_params(model), params, strict=True):
            difference = largest_difference(mine, right.detach())
            # Muon multiplies bfloat16 numbers. A difference in float32's last place can round one of them to
            # its neighbor.
            assert difference < (max(coarse, 1e-3) if "Muon" in name else coarse), f"{case}: {difference}"
        after = fp32_state_dict(optimizer)["state"]
        for entry, right in zip(after.values(), twin.state_dict()["state"].values(), strict=True):
            for key, value in right.items():
                difference = largest_difference(torch.as_tensor(entry[key]), torch.as_tensor(value).double())
                assert difference < STATES[state], f"{case}, {key}: {difference}"


COMPRESSED = {form: STATES[form] for form in ("bf16", "8bit")}


def first_steps(build, state):
    """Take the first step with compressed state and the class's own first step. Return both sides' tensors."""
    sides = []
    for is_ours in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(16, 24, generator=generator)) for _ in range(2)]
        optimizer = build(params)
        store_weights(torch.nn.ParameterList(params), optimizer, state=state if is_ours else "fp32")
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        scaler = GradScaler("cpu", enabled=False, one_pass=is_ours)
        scaler.step(optimizer)
        entries = fp32_state_dict(optimizer)["state"].values()
        states = [{key: torch.as_tensor(value) for key, value in entry.items()} for entry in entries]
        sides.append(([param.detach() for param in params], states))
    return zip(*sides, strict=True)


def assert_first_steps_agree(build, state):
    (params, right_params), (states, right_states) = first_steps(build, state)
    for mine, right in zip(params, right_params, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
    for mine, right in zip(states, right_states, strict=True):
        assert mine.keys() == right.keys()
        for key, value in right.items():
            assert largest_difference(mine[key], value.double()) < COMPRESSED[state], key


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("state", COMPRESSED)
@pytest.mark.filterwarnings("ignore:AdamWScheduleFree keeps 'z' in float32")
def test_the_first_step_with_compressed_state_is_that_of_its_own_class(name, state):
    """With compressed state, the first step is in one pass too. So the states must begin as in the class."""
    assert_first_steps_agree(lambda params: make(name, params), state)


class BeginsAtOne(torch.optim.Optimizer):
    """Lion, with an average that begins at 1."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.ones_like(param))
                (beta1, beta2), grad = group["betas"], param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_((beta1 * average + (1 - beta1) * grad).sign(), alpha=group["lr"])
                average.mul_(beta2).add_(grad, alpha=1 - beta2)


@pytest.mark.parametrize("state", COMPRESSED)
@pytest.mark.filterwarnings("ignore:BeginsAtOne keeps 'average' in float32")
def test_a_state_that_is_not_a_moment_begins_as_its_own_class_says(state, monkeypatch):
    row = replace(RULES["lion_pytorch.lion_pytorch.Lion"], rule=lambda _: ("lion", ("average",)), fixed={})
    monkeypatch.setitem(RULES, f"{__name__}.BeginsAtOne", row)
    assert not why_not(BeginsAtOne([torch.nn.Parameter(torch.ones(2))]))
    assert_first_steps_agree(BeginsAtOne, state)


def test_a_class_that_changes_the_step_is_not_taken_for_its_base(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(2))]
    cls = importlib.import_module("lion_pytorch").Lion

    class Changed(cls):
        pass

    assert not why_not(cls(params))
    assert "there is no rule for the class" in why_not(Changed(params))
    assert why_not(cls(params, decoupled_weight_decay=True)) == "decoupled_wd=True"
    other = cls(params)
    other.defaults["cautious_factor"] = 0.5  # as a later release might do
    assert why_not(other) == "its option cautious_factor is not known"
    monkeypatch.setattr(cls, "step", lambda self, closure=None: None)
    assert why_not(cls(params)) == "its step was replaced"


def test_muon_leaves_sharded_matrices_to_the_own_step():
    """The products of a shard are not a shard of the products."""
    group = {"params": [types.SimpleNamespace(_local_tensor=torch.ones(2, 2))]}
    with pytest.raises(ValueError, match="need whole matrices"):
        step_of(None, group)


MODIFIED = {
    "Lion of timm": [{"caution": True}, {"corrected_weight_decay": True}],
    "Lion of pytorch_optimizer": [
        {"cautious": True},
        {"weight_decouple": False},
        {"fixed_decay": True},
        {"maximize": True},
        {"use_gc": True},
        {"adanorm": True, "adanorm_r": 0.9},
    ],
}


@pytest.mark.parametrize(("name", "options"), [(name, o) for name in MODIFIED for o in MODIFIED[name]])
def test_an_option_that_changes_the_step_keeps_the_step_of_the_class(name, options):
    params = [torch.nn.Parameter(torch.ones(4, 4))]
    made = make(name, params)
    assert not why_not(made)
    assert next(iter(options)) in why_not(type(made)(params, **options))
    group = {"params": [torch.nn.Parameter(torch.ones(4, 4))], **options}
    if "maximize" not in options:  # in pytorch_optimizer this is an attribute of the optimizer
        made.add_param_group(group)
        assert next(iter(options)) in why_not(made)


class Traffic(TorchDispatchMode):
    """Counts how often ops read gradients, and the bytes that they move outside of matrix products."""

    def __init__(self, params):
        super().__init__()
        self.gradients = {param.grad.data_ptr() for param in params}
        self.reads = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"mm", "addmm", "empty_like", "permute", "detach"}:
            return result
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {id(leaf) for leaf in read}
        made = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and id(leaf) not in known
        ]
        written = [
            leaf
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
        ]
        self.reads += sum(leaf.data_ptr() in self.gradients for leaf in read)
        self.bytes += sum(leaf.nbytes for leaf in (*read, *written, *made))
        return result


def test_a_step_of_muon_moves_few_bytes_beside_its_products():
    """For a float32 element it moves 46 bytes: 4 for the check, 20 in the op before the products, 10 in the
    op after.

    Between the two, torch rounds to bfloat16 (6 bytes) and divides by the norm (6 bytes). The count is 6
    higher, because it assumes that an op reads and writes every argument that it may write.
    """
    moved, reads = {}, {}
    for scaler in (GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)):
        params = [torch.nn.Parameter(torch.randn(256, 128)), torch.nn.Parameter(torch.randn(128, 256))]
        optimizer = torch.optim.Muon(params)
        for _ in range(2):  # the first step creates the state
            optimizer.zero_grad()
            scaler.scale(sum((param * param).sum() for param in params)).backward()
            is_ours = isinstance(scaler, GradScaler)
            with Traffic(params) as traffic:
                if is_ours:
                    scaler.clip_and_step(optimizer, 1.0)
                else:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                    scaler.step(optimizer)
            scaler.update()
        reads[is_ours] = traffic.reads / len(params)
        moved[is_ours] = traffic.bytes / sum(param.numel() for param in params)
    assert reads[True] == 2, "one measures, one steps"
    assert reads[False] >= 5
    assert moved[True] < 53, moved
    assert moved[False] > 1.4 * moved[True], moved


def test_every_row_is_of_a_class_that_is_tested():
    tested = {type(make(name, [torch.nn.Parameter(torch.ones(2, 2))])) for name in ALL}
    names = {f"{inspect.getmodule(kind.__init__).__name__}.{kind.__qualname__}" for kind in tested}
    assert set(RULES) == names
