"""A model whose weights are stored: copies, pickles, checkpoints, averages, what is kept in float32."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_plugin import store_weights
from amp_plugin.kernels.build import native_core
from amp_plugin.weights.store import in_fp32, weight_bytes
from amp_plugin.weights.weight import has_room
from tests.warm_processes import run_program


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def give_gradients(step, model):
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator).bfloat16().float()
        param.grad = grad.to(param.grad_dtype)


def trained(weights="bf16", steps=5, make=torch.optim.AdamW):
    model = network()
    optimizer = make(model.parameters(), lr=1e-3)
    store = store_weights(model, optimizer, weights=weights)
    go_on(model, optimizer, 0, steps)
    return model, optimizer, store


def go_on(model, optimizer, first, last):
    for step in range(first, last):
        give_gradients(step, model)
        optimizer.step()


def exact(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    one, other = exact(one), exact(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def saved(*things):
    file = io.BytesIO()
    torch.save([owner.state_dict() for owner in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("weights", ["bf16", "fp16", "bf16-stochastic"])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_run_resumes_bit_for_bit(weights, model_first):
    model, optimizer, _ = trained(weights)
    state, optimizer_state = saved(model, optimizer)
    go_on(model, optimizer, 5, 10)
    other = network(seed=1)
    others = torch.optim.AdamW(other.parameters(), lr=1.0)
    store_weights(other, others, weights=weights)
    loads = [lambda: other.load_state_dict(state), lambda: others.load_state_dict(optimizer_state)]
    for load in loads if model_first else reversed(loads):
        load()
    go_on(other, others, 5, 10)
    assert_same(model, other)


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_float32_runs_load_it_and_it_loads_theirs(weights):
    model, optimizer, _ = trained(weights)
    state, optimizer_state = saved(model, optimizer)
    plain = network(seed=1)
    plains = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(state)
    plains.load_state_dict(optimizer_state)
    assert_same(model, plain)
    go_on(plain, plains, 5, 8)
    back, backs, _ = trained(weights, steps=0)
    states = saved(plain, plains)
    back.load_state_dict(states[0])
    backs.load_state_dict(states[1])
    assert_same(back, plain)
    go_on(back, backs, 8, 10)
    go_on(plain, plains, 8, 10)
    assert_same(back, plain)


def test_a_state_dict_that_does_not_fit_changes_nothing():
    model, optimizer, _ = trained()
    before = exact(model)
    state = saved(optimizer)[0]
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(state)
    go_on(model, optimizer, 0, 0)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert all(torch.equal(exact(model)[name], value) for name, value in before.items())


def test_a_state_dict_loads_into_a_plain_model():
    model, _, _ = trained()
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    plain = network()
    plain.load_state_dict(state)
    assert_same(model, plain)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_model_and_optimizer_trains_on(way):
    model, optimizer, _ = trained()
    if way == "deepcopy":
        other, others = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other, others = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        other, others = torch.load(file, weights_only=False)
    assert_same(model, other)
    assert other[0].weight is not model[0].weight
    for run in ((model, optimizer), (other, others)):
        go_on(*run, 5, 8)
    assert_same(model, other)
    assert type(other[0].weight) is nn.Parameter
    assert other[0].weight.dtype is torch.float32


def test_averages_are_of_float32():
    plain = network()
    plains = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer, _ = trained(steps=0)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert {param.dtype for param in ours.parameters()} == {torch.float32}
    for step in range(10):
        go_on(plain, plains, step, step + 1)
        go_on(model, optimizer, step, step + 1)
        average.update_parameters(plain)
        with in_fp32(model):
            ours.update_parameters(model)
    assert all(map(torch.equal, ours.module.state_dict().values(), average.module.state_dict().values()))


def test_what_is_written_in_float32_is_stored():
    model, optimizer, _ = trained()
    with in_fp32(model):
        for param in model.parameters():
            param.data.mul_(1.0 + 2.0**-12)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(exact(model)[name], value) for name, value in wanted.items())
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_fp32_modules_and_batch_norm_stay_in_float32():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
    )
    store = store_weights(model.half(), weights="bf16", fp32_modules=["LayerNorm", "4"])
    dtypes = [next(part.parameters()).dtype for part in model if list(part.parameters())]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert model[1].running_mean.dtype is torch.float32
    assert len(store) == 2
    with pytest.raises(
        ValueError, match="fp32_modules: 'Nothing' is no name or class of a module in Sequential"
    ):
        store_weights(network(), fp32_modules=["Nothing"])


def test_frozen_weights_stay_as_they_came():
    model = network().bfloat16()
    model[0].requires_grad_(False)
    store_weights(model, weights="fp32")
    assert [model[0].weight.dtype, model[2].weight.dtype] == [torch.bfloat16, torch.float32]


def test_a_weight_that_is_unfrozen_later_is_stored_at_its_first_forward():
    plain, model = network(), network()
    for net in (plain, model):
        net[0].requires_grad_(False)
    plain[0].bfloat16().float()
    model[0].bfloat16()
    for net in (plain, model):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
        if net is model:
            store = store_weights(model, optimizer)
        assert (net[0].weight.dtype is torch.bfloat16) is (net is model)
        net[0].requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.ones(1, 7))
        go_on(net, optimizer, 0, 20)
    assert len(store) == 4
    assert_same(plain, model)


def test_bytes_a_parameter():
    held = {}
    for weights in ("fp32", "bf16", "fp16", "bf16-stochastic"):
        model, optimizer, _ = trained(weights, steps=1)
        counted = weight_bytes(model, optimizer)
        held[weights] = (counted.weights, counted.masters, counted.gradients)
        assert counted.per_parameter()["optimizer_state"] == pytest.approx(8, rel=0.05), "and a step each"
    count = counted.parameters
    assert {name: tuple(part / count for part in parts) for name, parts in held.items()} == {
        "fp32": (4, 0, 4),
        "bf16": (2, 2, 4),
        "fp16": (2, 4, 4),
        "bf16-stochastic": (2, 0, 4),
    }
    assert str(counted).endswith(
        "(weights 2, kept beside them 0, gradients 4, optimizer state 8.16) for 102 parameters"
    )


def test_compiled_models_and_checkpointing_give_float32_gradients():
    from torch.utils.checkpoint import checkpoint

    model, optimizer, _ = trained(steps=1)
    optimizer.zero_grad()
    x = torch.randn(4, 7, dtype=torch.bfloat16)
    torch.compile(model, backend="aot_eager")(x).float().sum().backward()
    compiled = [param.grad.clone() for param in model.parameters()]
    optimizer.zero_grad()
    checkpoint(model, x, use_reentrant=False).float().sum().backward()
    for param, grad in zip(model.parameters(), compiled, strict=True):
        assert param.grad.dtype is grad.dtype is torch.float32
        torch.testing.assert_close(param.grad, grad, rtol=0.05, atol=0.05)


def test_a_sharded_model_is_refused():
    class FullyShardedDataParallel(nn.Linear):
        """Of torch's name; the real one needs processes."""

    with pytest.raises(
        TypeError, match=r"weights='bf16' does not work on a sharded model: .* use FSDP\(model"
    ):
        store_weights(FullyShardedDataParallel(2, 2))
    store_weights(FullyShardedDataParallel(2, 2), weights="fp32")


@pytest.mark.skipif(not native_core().loaded, reason="no native core on this machine")
def test_storing_weights_loads_the_native_core(tmp_path):
    """In programs that use nothing else of ours, too: in plain torch ops their steps took nine times as long."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from amp_plugin import store_weights\n"
        "store_weights(torch.nn.Linear(2, 2))\n"
        "print(torch._C._dispatch_has_kernel_for_dispatch_key('amp_plugin::pack_weights_', 'CPU'))\n"
    )
    assert run_program(program).stdout.split()[-1] == "True"


def test_unknown_ways_are_refused():
    for given, meant in (
        ("bf16_true", "bf16-true"),
        ("half", "fp16"),
        ("stochastic", "bf16-stochastic"),
        ("float", "fp32"),
    ):
        with pytest.raises(
            ValueError, match=f"weights='{given}' is unknown; .* did you mean weights='{meant}'"
        ):
            store_weights(network(), weights=given)


def test_a_state_dict_is_made_on_the_host_where_a_gpu_is_nearly_full(monkeypatch):
    model, _, _ = trained()
    wanted = exact(model)
    monkeypatch.setattr("amp_plugin.weights.weight.has_room", lambda _: False)
    with pytest.warns(
        UserWarning, match="the state dict is made on the host, tensor by tensor: cpu has no room"
    ):
        state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_room_is_what_is_free_but_an_eighth(monkeypatch):
    class OnGpu:
        device = torch.device("cuda", 0)

        def numel(self):
            return 100

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    for free, room in ((1500, True), (1300, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 8000))
        assert has_room(OnGpu()) is room
    assert has_room(torch.ones(1))


def test_a_checkpoint_of_0_2_loads_all_bits():
    plain = network()
    wanted = plain.state_dict()
    halves = {name: pack(value) for name, value in wanted.items()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    rests = {number: low for number, (_, low) in enumerate(halves.values())}
    saved = {**optimizer.state_dict(), "amp_plugin_weights": {"form": "bf16", "steps": 3, "rests": rests}}
    for weights in ("bf16", "fp32", "fp16"):
        model = network(seed=1)
        loaded = torch.optim.AdamW(model.parameters())
        store_weights(model, loaded, weights=weights)
        model.load_state_dict({name: high for name, (high, _) in halves.items()})
        loaded.load_state_dict(copy.deepcopy(saved))
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items()), weights


def pack(value):
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    torch.ops.amp_plugin.pack_weights_([value], [high], [low])
    return high, low
