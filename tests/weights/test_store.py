"""A model with stored weights: checkpoints, averages, writes by other code, and which modules stay in
float32.

test_random_programs_equal_fp32.py applies copies, pickles, edits, conversions, saves and loads at random,
next to a float32 twin.
"""

import copy
import io
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from amp_plugin import autocast, restore_weights, store_weights
from amp_plugin.kernels.build import native_core
from amp_plugin.weights.formats import FORMATS
from amp_plugin.weights.store import in_fp32, weight_bytes
from amp_plugin.weights.weight import has_room, stored_weight
from tests.warm_processes import run_program
from tests.weights.twins import assert_same, exact, give_gradients, network, stepped_twins, train, twins


def trained(weights="bf16", steps=5, seed=0):
    model = network(seed)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    store_weights(model, optimizer, weights=weights)
    train((model,), [optimizer], steps)
    return model, optimizer


def saved(*things):
    file = io.BytesIO()
    torch.save([owner.state_dict() for owner in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("saves", ["bf16", "fp16", "bf16-stochastic", "fp32"])
@pytest.mark.parametrize("loads", ["bf16", "fp16", "bf16-stochastic", "fp32"])
def test_a_run_resumes_with_all_bits(saves, loads):
    model, optimizer = trained(saves)
    states = saved(model, optimizer)
    assert {value.dtype for value in states[0].values()} == {torch.float32}
    other, others = trained(loads, steps=0, seed=1)
    others.load_state_dict(states[1])
    other.load_state_dict(states[0])
    if loads != "bf16-stochastic":
        assert_same(model, other)
    if saves == loads or "bf16-stochastic" not in {saves, loads}:
        train((model, other), (optimizer, others), 5, first=5)
        assert_same(model, other)


def test_the_store_gives_the_float32_weights_for_a_block_or_as_a_copy():
    model = network(0)
    store = store_weights(model, optimizer := AdamW(model.parameters(), lr=1e-3))
    train((model,), [optimizer], 3)
    exported = store.fp32_state_dict(model)
    with store.in_fp32(model):
        assert model[0].weight.dtype is torch.float32
        for name, value in model.state_dict().items():
            assert torch.equal(exported[name], value)
            value.zero_()
    assert model[0].weight.dtype is torch.bfloat16
    assert not any(value.any() for value in model.state_dict().values())
    assert all(value.any() for value in exported.values()), "a copy"


def test_a_state_dict_that_does_not_fit_changes_nothing():
    model, optimizer = trained()
    before = copy.deepcopy(model)
    (state,) = saved(optimizer)
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert_same(model, before)


def assign_float32_as_data(model):
    for param, value in zip(model.parameters(), network(7).parameters(), strict=True):
        param.data = value.detach().clone()


def assign_16_bits(model):
    values = {name: value.bfloat16() for name, value in network(5).state_dict().items()}
    model.load_state_dict(values, assign=any(stored_weight(param) for param in model.parameters()))


@pytest.mark.parametrize("assign", [assign_float32_as_data, assign_16_bits])
@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_what_is_assigned_is_stored(assign, weights):
    models = twins(weights)[:2]
    for model in models:
        assign(model)
    train(models, [SGD(model.parameters(), lr=1e-5) for model in models], 20)
    assert_same(*models)


def test_one_dimension_for_none_and_integers_load_as_in_torch():
    store_weights(model := nn.ParameterList([torch.tensor(1.2345678)]), weights="bf16-true")
    for value in (torch.tensor([1 / 3]), torch.tensor(7)):
        model.load_state_dict({"0": value})
        assert model.state_dict()["0"] == value


def nested():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_the_state_dict_of_a_part_changes_nothing_in_that_of_the_whole():
    """The same name can mean different weights: the part's ``0.weight`` is the whole's ``1.0.weight``."""
    reference, stored, _ = twins(make=nested)
    assert_same(reference[1], stored[1])
    assert_same(reference, stored)
    state = stored.state_dict()
    for model in (reference, stored):
        model.load_state_dict(state)
    assert_same(reference, stored)


def tie(model):
    model.insert(0, nn.Linear(7, 9))
    model[0].weight = model[1].weight


def register_a_parametrization(model):
    parametrize.register_parametrization(model[2], "weight", nn.Identity())


@pytest.mark.parametrize("change", [tie, register_a_parametrization])
def test_modules_that_are_made_later_save_and_load_float32(change):
    reference, stored, _ = twins()
    for model in (reference, stored):
        torch.manual_seed(1)
        change(model)
    assert_same(reference, stored)
    for model in (reference, stored):
        model.load_state_dict({name: value * 1.001 for name, value in exact(reference).items()})
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        reference.load_state_dict(exact(model))
    assert_same(reference, stored)


def test_hooks_of_a_parameter_run_wherever_they_were_registered():
    _, model, _ = twins("bf16-true")
    weight, seen = model[0].weight, []
    weight.register_hook(lambda _: seen.append("at rest"))
    with in_fp32(model):
        weight.register_post_accumulate_grad_hook(lambda _: seen.append("in a block"))
        weight.sum().backward()
    weight.sum().backward()
    with in_fp32(model):
        restore_weights(model)
    weight.sum().backward()
    assert seen == ["at rest", "in a block"] * 3


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_float32_that_is_transposed_in_place_is_stored(weights):
    models = twins(weights, nested)[:2]
    with in_fp32(models[1]):
        for model in models:
            model[0].weight.data = model[0].weight.data.t()
    assert_same(*models)


@pytest.mark.parametrize("convert", [nn.Module.double, lambda model: model.load_state_dict(exact(model))])
def test_parameters_that_torch_would_swap_are_refused(convert):
    """Otherwise their remainders would be lost, and they would be trained in 16 bits."""
    reference, stored, _ = twins()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"[Ss]wap"):
            convert(stored)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same(reference, stored)


@pytest.mark.parametrize(("weights", "convert"), [("bf16", "half"), ("fp16", "bfloat16"), ("bf16", "float")])
def test_a_converted_model_is_an_error_at_the_next_use(weights, convert):
    (_, stored), (_, optimizer) = stepped_twins(lambda p: SGD(p, lr=0.1), weights)
    getattr(stored, convert)()
    give_gradients(0, stored)
    for use in (optimizer.step, stored.state_dict, lambda: restore_weights(stored)):
        with pytest.raises(RuntimeError, match=r"the model was converted.*restore_weights"):
            use()


def test_fp32_modules_and_batch_norm_stay_in_float32():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2)
    )
    store = store_weights(model.half(), weights="bf16", fp32_modules=["LayerNorm", "4"])
    dtypes = [next(part.parameters()).dtype for part in model if list(part.parameters())]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert model[1].running_mean.dtype is torch.float32
    assert len(store) == 2
    with pytest.raises(ValueError, match="fp32_modules: 'Nothing' is not a name or class of a module"):
        store_weights(network(), fp32_modules=["Nothing"])
    with pytest.raises(
        ValueError, match="weights='bf16' for a model on the meta device: give the model memory"
    ):
        store_weights(nn.Linear(1, 1, device="meta"))


class Both(nn.Bilinear):
    def forward(self, x):
        return super().forward(x, x)


MIXED = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
    "Bilinear": lambda: nn.Sequential(Both(8, 8, 8)),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("training", [True, False])
def test_modules_on_fp32_activations_on_the_cpu(name, training):
    torch.manual_seed(0)
    plain = MIXED[name]().train(training)
    model = copy.deepcopy(plain)
    store_weights(model)
    with autocast("cpu", dtype=torch.bfloat16):
        outs = [module(torch.ones(3, 8)) for module in (plain, model)]
    assert torch.equal(*outs)
    if training:
        outs[1].float().sum().backward()


def test_bytes_a_parameter():
    held = {}
    for weights in ("fp32", "bf16", "fp16", "bf16-stochastic"):
        counted = weight_bytes(*trained(weights, steps=1))
        parts = (counted.weights, counted.masters, counted.gradients)
        held[weights] = tuple(part / counted.parameters for part in parts)
        assert counted.per_parameter()["optimizer_state"] == pytest.approx(8, rel=0.05), "and a step each"
    assert held == {"fp32": (4, 0, 4), "bf16": (2, 2, 4), "fp16": (2, 4, 4), "bf16-stochastic": (2, 0, 4)}
    assert "(weights 2, masters 0, gradients 4, optimizer state 8.16)" in str(counted)


def test_compiled_models_and_checkpointing_give_float32_gradients():
    _, model, _ = twins()
    x, grads = torch.randn(4, 7, dtype=torch.bfloat16), []
    for forward in (
        torch.compile(model, backend="aot_eager"),
        partial(checkpoint, model, use_reentrant=False),
    ):
        model.zero_grad()
        forward(x).float().sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    assert {grad.dtype for grad in grads[0]} == {torch.float32}
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.05)


def test_fsdp1_is_refused_and_fsdp2_named():
    sharded = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)  # the real one needs several processes
    with pytest.raises(
        TypeError, match=r"weights='bf16' does not work with FSDP1.*Shard by FSDP2: fully_shard"
    ):
        store_weights(sharded)
    store_weights(sharded, weights="fp32")


@pytest.mark.skipif(not native_core().loaded, reason="no native core on this machine")
def test_storing_weights_loads_the_native_core(tmp_path):
    """This includes programs that use nothing else of ours.

    In plain torch ops their steps took nine times as long.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from amp_plugin import store_weights\n"
        "store_weights(torch.nn.Linear(2, 2))\n"
        "print(torch._C._dispatch_has_kernel_for_dispatch_key('amp_plugin::pack_weights_', 'CPU'))\n"
    )
    assert run_program(program).stdout.split()[-1] == "True"


@pytest.mark.parametrize(("name", "value"), [("weights", "half"), ("state", "8bits")])
def test_unknown_ways_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}='{value}' is not allowed"):
        store_weights(network(), **{name: value})


def test_a_state_dict_is_made_on_the_host_where_a_gpu_is_nearly_full(monkeypatch):
    reference, model, _ = twins()
    monkeypatch.setattr("amp_plugin.weights.weight.has_room", lambda _: False)
    with pytest.warns(UserWarning, match="the state dict is made on the CPU"):
        assert_same(reference, model)


def test_room_is_what_is_free_but_an_eighth(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    for free, room in ((1500, True), (1300, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 8000))
        assert has_room(on_gpu) is room
    assert has_room(torch.ones(1))


@pytest.mark.parametrize("weights", ["bf16", "fp32", "fp16"])
def test_a_checkpoint_of_0_2_loads_all_bits(weights):
    wanted = network()
    pairs = {name: FORMATS["bf16"].split(value) for name, value in exact(wanted).items()}
    rests = dict(enumerate(low for _, low in pairs.values()))
    model, optimizer = trained(weights, steps=0, seed=1)
    model.load_state_dict({name: high for name, (high, _) in pairs.items()})
    entry = {"amp_plugin_weights": {"form": "bf16", "steps": 3, "rests": rests}}
    optimizer.load_state_dict({**AdamW(wanted.parameters(), lr=1e-3).state_dict(), **entry})
    assert_same(model, wanted)
