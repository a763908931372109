"""Optimizer moments in bfloat16 and in 8-bit codes: steps, checkpoints, and code that reads them."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

from amp_plugin import GradScaler, restore_weights, store_weights
from amp_plugin.kernels.state_codes import BLOCK, BLOCK_BYTES, decode, draws, encode, encode_exactly, to_bf16
from amp_plugin.weights.compressed_state import CompressedState, fp32_state_dict
from amp_plugin.weights.store import weight_bytes
from tests.kernels.steps_of_torch import sgd_
from tests.weights.twins import assert_same

BOTH_WAYS = pytest.mark.parametrize("weights", ["fp32", "bf16"])
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
OTHERS = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
}
ALL = {**OPTIMIZERS, **OTHERS}


@pytest.fixture(params=["bf16", "8bit"])
def form(request):
    return request.param


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))


def trained(make, form, weights="fp32", steps=5, *, scaler=None, network=network):
    model = network()
    optimizer = make(model.parameters())
    store_weights(model, optimizer, weights=weights, state=form)
    take_steps(model, optimizer, range(steps), scaler)
    return model, optimizer


def take_steps(model, optimizer, steps, scaler=None):
    scaler = scaler or GradScaler("cpu", enabled=False)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        scaler.step(optimizer)


def states(optimizer):
    return [value for entry in optimizer.state.values() for value in entry.values() if value.dim() > 0]


def moments(optimizer):
    return [state.kept.clone() for state in states(optimizer)]


def all_equal(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 200 * BLOCK])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_near_the_numbers_and_decoded_ones_keep_their_bits(numel, signed):
    torch.manual_seed(numel)
    value = torch.randn(numel) * torch.rand(numel) ** 4
    value *= 10.0 ** torch.randint(-9, 3, (numel // BLOCK + 1, 1)).expand(-1, BLOCK).flatten()[:numel]
    value[:BLOCK] *= numel < 1000
    value = value if signed else value.square()
    for step in [None, *range(4)]:
        drawn = None if signed or step is None else draws(numel, step, 1, value.device)
        codes = encode(value, signed=signed, drawn=drawn)
        assert codes.numel() == -(-numel // BLOCK) * BLOCK_BYTES
        decoded = decode(codes, numel, signed=signed)
        assert torch.equal(decoded.sign()[decoded != 0], value.sign()[decoded != 0])
        assert signed or torch.equal(decoded > 0, value > 0), "second moments are 0 only of 0"
        again = encode_exactly(decoded, signed=signed)
        assert torch.equal(decode(again, numel, signed=signed), decoded)
        for start in range(0, numel, BLOCK):
            roots = [part[start : start + BLOCK].abs().sqrt() for part in (value, decoded)]
            unit = roots[0].max() / (127 if signed else 255)
            assert ((roots[0] - roots[1]).abs() <= unit * (0.51 if signed else 1.01)).all()


@pytest.mark.native
def test_a_first_moment_that_overflows_leaves_the_others_of_its_block_finite_and_a_nan_does_not():
    """Once, an infinite unit times the code 0 gave a nan, and the kernel stored +inf where -inf belonged."""
    grad = torch.randn(BLOCK)
    grad[:2] = torch.tensor([3e38, -3e38])
    codes, param = encode(grad, signed=True), torch.zeros(BLOCK)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    sgd_(torch.ops.amp_plugin, [param], [grad], [codes], [], **options, nesterov=False, maximize=False)
    infinite = torch.tensor([math.inf, -math.inf])
    assert torch.equal(param[:2], -infinite)
    assert torch.equal(codes, encode(torch.cat([infinite, grad[2:]]), signed=True))
    torch.testing.assert_close(decode(codes, 3, signed=True), torch.tensor([2.0**127, -(2.0**127), 0.0]))
    grad[BLOCK // 2] = math.nan
    sgd_(torch.ops.amp_plugin, [param], [grad], [codes], [], **options, nesterov=False, maximize=False)
    assert decode(codes, BLOCK, signed=True).isnan().all()
    assert to_bf16(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32), torch.tensor(1)).isnan()


def test_second_moments_are_rounded_without_bias(form):
    torch.manual_seed(0)
    value, total = torch.rand(1000) + 0.1, torch.zeros(1000, dtype=torch.float64)
    for step in range(1, 2001):
        drawn = draws(1000, step, 1, value.device)
        if form == "bf16":
            total += to_bf16(value, drawn).double()
        else:
            total += decode(encode(value, signed=False, drawn=drawn), 1000, signed=False).double().sqrt()
    expected = value.double() if form == "bf16" else value.double().sqrt()
    spacing = 2.0**-7 if form == "bf16" else 1.05**0.5 / 255
    assert ((total / 2000 - expected).abs() < 6 * spacing * 0.5 / 2000**0.5).all()
    assert (total / 2000 - expected).mean().abs() < 2e-6


@pytest.mark.native
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
@BOTH_WAYS
def test_one_step_with_given_moments_has_the_bits_of_float32_state(name, form, weights):
    make = ALL[name]
    model, optimizer = trained(make, form, weights)
    twin = network()
    twin.load_state_dict(model.state_dict())
    with_float32_state = make(twin.parameters())
    with_float32_state.load_state_dict(copy.deepcopy(fp32_state_dict(optimizer)))
    for one, its_optimizer in ((model, optimizer), (twin, with_float32_state)):
        scaler = GradScaler("cpu", enabled=False)
        take_steps(one, its_optimizer, [7], scaler)
        assert scaler.last_step(its_optimizer).one_pass is True
    assert all(isinstance(state, CompressedState) for state in states(optimizer))
    assert_same(model, twin)


@pytest.mark.native
@pytest.mark.parametrize("name", OPTIMIZERS)
@BOTH_WAYS
def test_the_first_step_is_that_of_torch_and_holds_no_float32_states(name, form, weights):
    scaler = GradScaler("cpu", enabled=False)
    model, optimizer = trained(OPTIMIZERS[name], form, weights, steps=1, scaler=scaler)
    assert scaler.last_step(optimizer).one_pass
    plain = network()
    other = OPTIMIZERS[name](plain.parameters())
    take_steps(plain, other, [0])
    torch.testing.assert_close(
        dict(model.state_dict()), dict(plain.state_dict()), rtol=2.0**-21, atol=2.0**-24
    )
    for mine, its in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert mine.keys() == its.keys()
        assert all(mine[key].dtype is its[key].dtype for key in its)


def test_states_that_may_be_weights_stay_float32():
    model = network()
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-3)
    store_weights(model, optimizer, weights="fp32", state="8bit")
    optimizer.train()
    with pytest.warns(UserWarning, match="keeps 'z' in float32"):
        take_steps(model, optimizer, [0])
    entry = next(iter(optimizer.state.values()))
    assert type(entry["z"]) is torch.Tensor
    assert isinstance(entry["exp_avg_sq"], CompressedState)
    take_steps(model, optimizer, [1])


def test_a_skipped_step_changes_nothing(form):
    model, optimizer = trained(OPTIMIZERS["AdamW"], form)
    before = copy.deepcopy(model), moments(optimizer)
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    GradScaler("cpu", enabled=False).step(optimizer)
    assert_same(before[0], model)
    assert all_equal(before[1], moments(optimizer))


def test_parameters_added_later_and_optimizers_made_later(form):
    store_weights(model := network(), weights="bf16", state=form)
    optimizer = OPTIMIZERS["AdamW"](model[0].parameters())
    take_steps(model[0], optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    take_steps(model, optimizer, range(3))
    assert len(states(optimizer)) == 8
    assert {state.form for state in states(optimizer)} == {form}


def test_a_later_call_decodes_the_states(form):
    model, optimizer = trained(OPTIMIZERS["AdamW"], form)
    before = [state.decoded() for state in states(optimizer)]
    store_weights(model, optimizer, weights="fp32")
    assert {type(state) for state in states(optimizer)} == {torch.Tensor}
    assert all_equal(before, states(optimizer))


def test_channels_last_and_gradients_of_another_layout(form):
    def convolution(memory_format):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(5, 7, 3)).to(memory_format=memory_format)

    layouts = (torch.channels_last, torch.contiguous_format)
    (model, optimizer), (plain, _) = (
        trained(OPTIMIZERS["AdamW"], form, network=lambda layout=layout: convolution(layout))
        for layout in layouts
    )
    assert states(optimizer)[0].stride() == model[0].weight.stride()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=2e-3)


def test_a_closure_sees_the_weights_and_exceptions_end_the_step():
    model, optimizer = trained(OPTIMIZERS["AdamW"], "8bit", "bf16")

    def are_kept():
        assert model[0].weight.dtype is torch.bfloat16
        return all(isinstance(state, CompressedState) for state in states(optimizer))

    def wrong():
        raise KeyError

    assert optimizer.step(are_kept) is True
    assert are_kept()
    with pytest.raises(KeyError):
        optimizer.step(wrong)
    take_steps(model, optimizer, [1])
    assert are_kept()


@BOTH_WAYS
def test_a_step_with_a_closure_is_the_step_without(form, weights):
    """States are decoded once, after the closure's first call. If they were encoded again around each call,
    they would be rounded twice.

    The class has no rule, so its own step runs both times.
    """
    own = type("OwnNAdam", (torch.optim.NAdam,), {})
    (model, optimizer), (other, others) = (trained(own, form, weights) for _ in range(2))
    optimizer.step()
    others.step(lambda: 1.0)
    assert_same(model, other)
    assert all_equal(moments(optimizer), moments(others))


@pytest.mark.parametrize("name", [*OPTIMIZERS, "RMSprop"])
@BOTH_WAYS
def test_a_resumed_run_is_the_same_to_the_bit(name, form, weights):
    model, optimizer = trained(ALL[name], form, weights)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    resumed, other = trained(ALL[name], form, weights, steps=0)
    for part, state in zip((resumed, other), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert all_equal(moments(optimizer), moments(other))
    for one, its in ((model, optimizer), (resumed, other)):
        take_steps(one, its, range(5, 10))
    assert_same(model, resumed)
    assert all_equal(moments(optimizer), moments(other))


@pytest.mark.parametrize(("saves", "loads"), list(itertools.permutations(["fp32", "bf16", "8bit"], 2)))
def test_checkpoints_load_into_runs_of_another_format(saves, loads):
    _, optimizer = trained(OPTIMIZERS["AdamW"], saves)
    model, other = trained(OPTIMIZERS["AdamW"], loads, steps=0)
    other.load_state_dict(optimizer.state_dict())
    assert {getattr(state, "form", "fp32") for state in states(other)} == {loads}
    for pair in zip(states(copy.deepcopy(optimizer)), states(other), strict=True):
        old, new = (part.sqrt() for part in pair) if (pair[0] >= 0).all() else pair
        torch.testing.assert_close(new + 0, old, rtol=0.05, atol=0.02)
    take_steps(model, other, [1])


def test_copies_and_pickles_are_float32_and_torchs_own_layout_loads_without_this_package(form):
    model, optimizer = trained(OPTIMIZERS["AdamW"], form)
    plain = OPTIMIZERS["AdamW"](network().parameters())
    plain.load_state_dict(fp32_state_dict(optimizer))
    for other in (plain, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert {type(state) for state in states(other)} == {torch.Tensor}
        assert all_equal(states(other), [state.decoded() for state in states(optimizer)])
    restore_weights(model)
    plain.load_state_dict(optimizer.state_dict())
    assert all_equal(states(other), states(plain))


def test_states_are_read_and_written_as_float32(form):
    model, optimizer = trained(OPTIMIZERS["AdamW"], form)
    state = states(optimizer)[0]
    assert (state.dtype, state.shape) == (torch.float32, (30, 40))
    assert torch.equal(state + 0, state.decoded())
    assert state.mul_(0.5) is state
    state.zero_()
    assert not state.decoded().any()
    assert isinstance(state.to("cpu"), CompressedState)
    restore_weights(model)
    take_steps(model, optimizer, [5])
    assert {type(state) for state in states(optimizer)} == {torch.Tensor}


def test_bytes():
    for weights, form, most in (("bf16", "8bit", 10.3), ("bf16", "bf16", 12.1), ("fp32", "8bit", 10.3)):
        model = nn.Linear(256, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        store_weights(model, optimizer, weights=weights, state=form)
        take_steps(model, optimizer, range(2))
        assert weight_bytes(model, optimizer).per_parameter()["total"] <= most


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step_keeps_the_state_compressed_and_learns_as_the_eager_one(name, form):
    (model, optimizer), (other, others) = (trained(OPTIMIZERS[name], form, steps=2) for _ in range(2))
    others.step = torch.compile(others.step, backend="eager")
    take_steps(model, optimizer, range(3))
    take_steps(other, others, range(3))
    eager, compiled = dict(model.state_dict()), dict(other.state_dict())
    # beta**step is computed by a tensor here
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert [part.dtype for part in moments(others)] == [part.dtype for part in moments(optimizer)]
