"""Weights that come in 16 bits, or are stored in them, train in every framework as float32 ones do."""

import warnings

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from amp_plugin import AmpKwargs, AmpMonitor, AmpPrecision, FabricAmpPrecision, autocast, store_weights
from amp_plugin.adapters.accelerate import install
from amp_plugin.weights.store import convert_to_fp32
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import QUIET, Linear, OneWeight, fit, make_trainer
from tests.adapters.tiny_bert import bert, texts

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:.*are float32 now:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

WAYS = ["fp32", "bf16", "bf16-stochastic"]
LR = 1e-5
STEPS = 50


def data(count=STEPS):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 4, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1, keepdim=True)), batch_size=None)


def module(**options):
    return Linear(torch.optim.AdamW, weight_decay=0.0, **{"lr": LR, **options})


def values(model):
    """The weights in float32, exact where they are stored in 16 bits."""
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


def share_moved(before, after):
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before])
    return moved.float().mean().item()


def in_trainer(model, weights, precision="bf16"):
    fit(model, AmpPrecision(precision, weights=weights), steps=STEPS, data=data())
    return model


def train(net, optimizer, backward):
    for x, y in data():
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()


def in_fabric(model, weights, precision="bf16"):
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision(precision, weights=weights))
    net, optimizer = fabric.setup(
        model.net, torch.optim.AdamW(model.net.parameters(), lr=LR, weight_decay=0.0)
    )
    train(net, optimizer, fabric.backward)
    return model


def in_accelerate(model, weights, precision="bf16"):
    accelerator = ours(precision=precision, weights=weights)
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=LR, weight_decay=0.0)
    optimizer, net = accelerator.prepare(optimizer, model.net)
    train(net, optimizer, accelerator.backward)
    return model


def in_a_plain_loop(model, weights, precision="bf16"):
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=LR, weight_decay=0.0)
    store_weights(model.net, optimizer, weights=weights)
    for x, y in data():
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model.net(x), y)
        loss.backward()
        optimizer.step()
    return model


PROGRAMS = [in_trainer, in_fabric, in_accelerate, in_a_plain_loop]


@pytest.mark.parametrize("weights", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_that_comes_in_bfloat16_moves_wholly(program, weights):
    model = module().bfloat16()
    before = values(model)
    after = values(program(model, weights))
    moved = share_moved(before, after)
    if weights == "bf16-stochastic":
        assert moved > 0.1, "each weight moves with the probability of its update"
    else:
        assert moved == 1.0
    gives_back = weights == "fp32" or program is in_trainer
    assert model.net[0].weight.dtype is (torch.float32 if gives_back else torch.bfloat16)


def tiny_bert():
    torch.manual_seed(0)
    return bert(layers=1).bfloat16()


def in_transformers(model, folder, steps, resume=None, **options):
    """Train by transformers' Trainer, which makes its own Accelerator."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant", data_seed=1, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=texts(16))
    trainer.train(resume_from_checkpoint=resume)
    return values(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_bert_in_bfloat16_moves_wholly_under_transformers_trainer(weights, tmp_path):
    install(AmpKwargs(weights=weights))
    model = tiny_bert()
    before = values(model)
    after = in_transformers(model, tmp_path, STEPS, learning_rate=LR)
    layer = [name for name in before if "intermediate.dense.weight" in name]
    assert share_moved({name: before[name] for name in layer}, after) == 1.0
    assert model.classifier.weight.dtype is (torch.bfloat16 if weights == "bf16" else torch.float32)


def test_a_layer_loaded_in_bfloat16_moves_by_3_percent_without_any_of_it():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).bfloat16()
    before = values(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(STEPS):
        x = torch.randn(16, 64)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = (layer(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    assert share_moved(before, values(layer)) == pytest.approx(0.033, abs=0.01)


@pytest.mark.parametrize("program", PROGRAMS[:3])
def test_stored_weights_end_near_the_float32_run(program):
    ends = {}
    for weights in ("fp32", "bf16"):
        ends[weights] = values(program(module(lr=1e-2), weights))
    for name, value in ends["fp32"].items():
        torch.testing.assert_close(ends["bf16"][name], value, rtol=0, atol=STEPS * LR * 0.2)


@pytest.mark.parametrize("program", PROGRAMS[:3])
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_a_model_that_comes_in_float16_trains_in_float16(program, weights):
    model = module().half()
    before = values(model)
    after = values(program(model, weights, "fp16"))
    assert share_moved(before, after) > 0.9


@pytest.mark.parametrize("program", PROGRAMS[:3])
def test_one_line_says_what_became_float32(program):
    model = module().bfloat16()
    model.net[0].bias.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(model, "fp32")
    told = [str(warning.message) for warning in caught if "float32 now" in str(warning.message)]
    (line,) = told
    assert line == (
        "3 trainable parameters came in bfloat16 (290 bytes) and are float32 now (290 bytes more), since 16 bits "
        "lose small updates. weights='bf16' keeps them in bfloat16, as exactly"
    )
    assert model.net[0].bias.dtype is torch.bfloat16, "frozen ones stay"


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_weights_that_are_made_later_are_told_of_once():
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16"))
    model = module().bfloat16().net
    model[0].requires_grad_(False)
    net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))

    loose = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def step():
        optimizer.zero_grad()
        fabric.backward(net(torch.ones(1, 8)).sum())
        loose.grad = torch.ones_like(loose)
        return warnings_of(optimizer.step)

    assert step() == []
    model[0] = nn.Linear(8, model[0].out_features, dtype=torch.bfloat16)
    optimizer.optimizer.add_param_group({"params": list(model[0].parameters())})
    assert step() == []
    assert model[0].weight.dtype is torch.float32, "parameters of the model, before their first forward"
    optimizer.optimizer.add_param_group({"params": [loose]})
    (line,) = step()
    assert line.startswith("1 parameters in 16 bits were frozen, or not made yet, when the model was set up")
    assert "AdamW steps them now: updates below 1/256 of a weight" in line
    assert step() == []


class ThawedInMidRun(Linear):
    """Its first layer is frozen for the first epoch."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_trainer_trains_weights_that_are_thawed_later_as_in_float32(precision):
    runs = []
    for dtype in (torch.float32, torch.bfloat16 if precision == "bf16" else torch.float16):
        torch.manual_seed(0)
        model = ThawedInMidRun(torch.optim.AdamW, weight_decay=0.0, lr=1e-5)
        model.to(torch.bfloat16 if precision == "bf16" else torch.float16)
        model.net[2].float()
        model.net[0].to(dtype).requires_grad_(False)
        lines = warnings_of(
            lambda model=model: fit(
                model,
                AmpPrecision(precision),
                steps=6,
                data=data(3),
                max_epochs=2,
                enable_checkpointing=False,
            )
        )
        said = [line for line in lines if "16 bits lose small updates" in line]
        assert len(said) == (dtype is not torch.float32), lines
        runs.append(values(model))
    plain, thawed = runs
    assert all(torch.equal(plain[name], thawed[name]) for name in plain)


def test_buffers_of_converted_modules_follow():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).bfloat16()
    convert_to_fp32(model)
    assert {tensor.dtype for tensor in model[1].buffers() if tensor.is_floating_point()} == {torch.float32}
    with autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 1, 3, 3)).sum().backward()


def test_nothing_is_converted_where_nothing_casts():
    model = module().bfloat16()
    accelerator = ours(precision="no")
    with pytest.warns(
        UserWarning, match="4 trainable parameters are in 16 bits and stay so: updates below 1/256"
    ):
        accelerator.prepare(model.net)
    assert model.net[0].weight.dtype is torch.bfloat16


# -- checkpoints ----------------------------------------------------------------------------------


def moments(optimizer):
    return [value for entry in optimizer.state.values() for name, value in entry.items() if name != "step"]


@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True)])
def test_accelerate_loads_moments_of_another_format(saves, loads, state, tmp_path):
    for compresses, act in ((saves, "save_state"), (loads, "load_state")):
        form = state if compresses else "fp32"
        accelerator = ours(precision="bf16", state=form)
        model = module().net
        inner = torch.optim.AdamW(model.parameters())
        net, optimizer = accelerator.prepare(model, inner)
        for x, y in data(3):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
        getattr(accelerator, act)(tmp_path)
        assert {getattr(value, "form", "fp32") for value in moments(inner)} == {form}
        reset()


def test_fabric_keeps_moments_in_codes(tmp_path):
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16", weights="bf16", state="8bit"))
    inner = module().net
    net, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=LR))
    train(net, optimizer, fabric.backward)
    before = [value.kept.clone() for value in moments(optimizer.optimizer)]
    fabric.save(tmp_path / "all.ckpt", {"net": net, "optimizer": optimizer})
    train(net, optimizer, fabric.backward)
    fabric.load(tmp_path / "all.ckpt", {"net": net, "optimizer": optimizer})
    after = [value.kept for value in moments(optimizer.optimizer)]
    assert len(before) == 8
    assert all(map(torch.equal, before, after))


class Recorded(Linear):
    """Keeps the exact weights that training starts with."""

    def on_train_start(self):
        self.started = values(self)


def recorded():
    return Recorded(torch.optim.AdamW, lr=1e-2)


def trainer_run(folder, weights, steps, resume=None, state="fp32", model=None, callbacks=()):
    model = model or recorded()
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(
        AmpPrecision("bf16", weights=weights, state=state),
        steps,
        enable_checkpointing=True,
        callbacks=[*callbacks, checkpoint],
    )
    same = [next(iter(data(1)))] * 20  # the Trainer begins an epoch's data anew
    trainer.fit(model, DataLoader(same, batch_size=None), ckpt_path=resume)
    return model


@pytest.mark.parametrize(
    ("weights", "state"),
    [*((way, "fp32") for way in WAYS), ("fp32", "8bit"), ("bf16", "8bit"), ("bf16", "bf16")],
)
def test_a_trainer_resumes_bit_for_bit(weights, state, tmp_path):
    whole = trainer_run(tmp_path / "whole", weights, 8, state=state)
    saved = tmp_path / "whole" / "step=4.ckpt"
    resumed = trainer_run(tmp_path / "resumed", weights, 8, resume=saved, state=state)
    for name, value in values(whole).items():
        assert torch.equal(values(resumed)[name], value), name


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_trainer_loads_the_other_way_of_storing_without_losing_a_bit(first, second, tmp_path):
    saved = trainer_run(tmp_path, first, 4)
    loaded = trainer_run(tmp_path / "second", second, 5, resume=tmp_path / "step=4.ckpt")
    for name, value in values(saved).items():
        assert torch.equal(loaded.started[name], value), name
    states = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert states["state_dict"]["net.0.weight"].dtype is torch.float32
    assert states["optimizer_states"][0]["state"][0]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_model_that_comes_in_bfloat16_resumes_all_bits(weights, averaged, tmp_path):
    def run(folder, resume=None):
        average = [EMAWeightAveraging(decay=0.9)] if averaged else []
        model = module(lr=1e-3).bfloat16()
        return values(trainer_run(folder, weights, 8, resume, model=model, callbacks=average))

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=tmp_path / "whole" / "step=4.ckpt")
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_bert_in_bfloat16_resumes_all_bits_under_transformers_trainer(weights, tmp_path):
    install(AmpKwargs(weights=weights))
    options = {"learning_rate": 1e-3, "save_steps": 4}
    whole = in_transformers(tiny_bert(), tmp_path / "whole", 8, **options)
    saved = str(tmp_path / "whole" / "checkpoint-4")
    resumed = in_transformers(tiny_bert(), tmp_path / "resumed", 8, saved, **options)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_after_fit_the_caller_has_an_fp32_model(precision, tmp_path):
    model = recorded()
    trainer = make_trainer(
        AmpPrecision(precision, weights="bf16" if precision == "bf16" else "fp32"), 4,
        enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="last")],
    )  # fmt: skip
    trainer.fit(model, data())
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert model.net(torch.ones(1, 8)).dtype is torch.float32
    assert not model.net[0]._state_dict_hooks
    loaded = Recorded.load_from_checkpoint(
        tmp_path / "last.ckpt", optimizer=torch.optim.AdamW, weights_only=False
    )
    for name, value in values(model).items():
        assert torch.equal(values(loaded)[name], value), name
    model.validation_step = lambda *_: None
    trainer.validate(model, data(2), verbose=False)
    assert model.net[0].weight.dtype is torch.float32


def test_accelerate_gives_an_fp32_model_back(tmp_path):
    accelerator = ours(precision="bf16", weights="bf16")
    model = recorded().net
    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x, y in data(4):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
    exact = values(model)
    accelerator.save_model(net, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert model[0].weight.dtype is torch.bfloat16
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    for state in (saved, plain.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in exact.items())
    assert plain(torch.ones(1, 8)).dtype is plain[0].weight.dtype is torch.float32


def test_pruning_in_the_trainer():
    model = recorded()
    pruning = ModelPruning("l1_unstructured", parameters_to_prune=[(model.net[0], "weight")], amount=0.5)
    fit(model, AmpPrecision("bf16", weights="bf16"), steps=4, data=data(2), max_epochs=2, callbacks=[pruning])
    assert 0.4 < (model.net[0].weight == 0).float().mean() < 0.8
    assert model.net[2].weight.dtype is torch.float32


def test_bf16_true_computes_in_bf16_without_autocast():
    seen = []

    class Watching(Linear):
        def training_step(self, batch, index):
            seen.append((torch.is_autocast_enabled("cpu"), batch[0].dtype, self.net(batch[0]).dtype))
            return super().training_step(batch, index)

    fit(Watching(torch.optim.AdamW, lr=1e-3), AmpPrecision("bf16-true"), steps=2, data=data())
    assert set(seen) == {(False, torch.bfloat16, torch.bfloat16)}
    model = recorded().net
    accelerator = ours(precision="bf16", weights="bf16-true")
    net = accelerator.prepare(model)
    assert net(torch.ones(2, 8)).dtype is torch.float32, "outputs, as Accelerate returns them"
    assert model[0].weight.dtype is torch.bfloat16


def accelerate_run(folder, weights, steps, resume=None, save_at=None):
    accelerator = ours(precision="bf16", weights=weights)
    model = recorded()
    net, optimizer = accelerator.prepare(model.net, torch.optim.AdamW(model.net.parameters(), lr=1e-2))
    if resume is not None:
        accelerator.load_state(resume)
    started = values(model.net)
    for number, (x, y) in enumerate(data(20)):
        if number < (4 if resume else 0) or number >= steps:
            continue
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        if number + 1 == save_at:
            accelerator.save_state(folder, safe_serialization=True)
    return started, values(model.net)


@pytest.mark.parametrize("weights", WAYS)
def test_accelerate_resumes_bit_for_bit_from_safetensors(weights, tmp_path):
    _, whole = accelerate_run(tmp_path, weights, 8, save_at=4)
    assert (tmp_path / "model.safetensors").is_file()
    _, resumed = accelerate_run(tmp_path, weights, 8, resume=tmp_path)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_accelerate_loads_the_other_way_of_storing(first, second, tmp_path):
    _, saved = accelerate_run(tmp_path, first, 4, save_at=4)
    loaded, _ = accelerate_run(tmp_path, second, 5, resume=tmp_path)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_fabric_resumes_bit_for_bit(tmp_path):
    def run(steps, resume):
        fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16", weights="bf16"))
        model = recorded()
        net, optimizer = fabric.setup(model.net, torch.optim.AdamW(model.net.parameters(), lr=1e-2))
        if resume:
            fabric.load(tmp_path / "state.ckpt", {"model": net, "optimizer": optimizer})
        for number, (x, y) in enumerate(data(20)):
            if number < (4 if resume else 0) or number >= steps:
                continue
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            if number == 3:
                fabric.save(tmp_path / "state.ckpt", {"model": net, "optimizer": optimizer})
        return values(model.net)

    whole, resumed = run(8, resume=False), run(8, resume=True)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_fabric_loads_the_other_way_of_storing(first, second, tmp_path):
    def set_up(weights):
        fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16", weights=weights))
        model = recorded()
        net, optimizer = fabric.setup(model.net, torch.optim.AdamW(model.net.parameters(), lr=1e-2))
        return fabric, model, {"model": net, "optimizer": optimizer}

    fabric, saved, state = set_up(first)
    for x, y in data(4):
        state["optimizer"].zero_grad()
        fabric.backward(nn.functional.mse_loss(state["model"](x), y))
        state["optimizer"].step()
    fabric.save(tmp_path / "state.ckpt", state)
    fabric, loaded, state = set_up(second)
    assert not torch.equal(values(loaded.net)["0.weight"], values(saved.net)["0.weight"])
    fabric.load(tmp_path / "state.ckpt", state)
    for name, value in values(saved.net).items():
        assert torch.equal(values(loaded.net)[name], value), name


# -- averages and the monitor --------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_an_average_is_of_masters(weights):
    decay, expected = 0.9, {}

    class Kept(Linear):
        def on_train_batch_end(self, *_):
            for name, value in values(self).items():
                first = name not in expected
                expected[name] = value if first else torch.lerp(expected[name], value, 1 - decay)

    callback = EMAWeightAveraging(decay=decay)
    model = Kept(torch.optim.AdamW, lr=1e-4).bfloat16()
    seen = {}

    def keep(*_):
        seen.update(
            {name: value.clone() for name, value in callback._average_model.module.state_dict().items()}
        )

    last = LambdaCallback(on_train_batch_end=keep)
    fit(model, AmpPrecision("bf16", weights=weights), steps=8, data=data(), callbacks=[callback, last])
    assert {value.dtype for value in seen.values()} == {torch.float32}
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-8)
        assert torch.equal(values(model)[name], seen[name]), "the average is what training leaves"
    assert not any(name.startswith("on_") for name in vars(callback)), "its hooks are its own again"


def test_stochastic_weight_averaging_averages_masters():
    ends = []

    class Kept(Linear):
        def on_train_epoch_end(self):
            ends.append(values(self))

    def swa():
        return StochasticWeightAveraging(swa_lrs=1e-5, swa_epoch_start=2, annealing_epochs=1)

    runs = {}
    for weights in ("bf16", "fp32"):
        ends.clear()
        model = Kept(torch.optim.AdamW, lr=1e-5).bfloat16()
        plugin = AmpPrecision("bf16", weights=weights)
        fit(model, plugin, steps=-1, max_epochs=4, data=data(4), callbacks=[swa()])
        runs[weights] = values(model), list(ends)
    for weights, (average, epochs) in runs.items():
        for name, value in average.items():
            averaged = epochs[:-1]  # those that epochs 1 to 3 begin with
            mean = torch.stack([epoch[name] for epoch in averaged]).double().mean(0)
            error = (value - mean).abs().max()
            assert error <= 1e-7, f"{name} under weights={weights!r}: {error:.2e} from the mean of masters"


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16-stochastic"])
def test_a_learning_rate_finder_leaves_every_bit_as_it_was(weights, tmp_path):
    class Tuned(Linear):
        def __init__(self):
            super().__init__(torch.optim.AdamW, lr=1e-3)
            self.lr = 1e-3

    model = Tuned()
    if weights == "bf16-stochastic":
        model.bfloat16()
    before = values(model)
    trainer = make_trainer(AmpPrecision("bf16", weights=weights), 8, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, data(), num_training=6, update_attr=False)
    for name, value in values(model).items():
        assert torch.equal(value, before[name]), name


def test_a_validation_on_averages_gives_the_weights_back():
    def run(validate):
        callback = EMAWeightAveraging(decay=0.9)
        model = Linear(torch.optim.AdamW, lr=1e-3)
        if validate:
            model.validation_step = lambda *_: None
        seen = []
        after = LambdaCallback(on_train_batch_end=lambda t, m, *_: seen.append(values(m)))
        trainer = make_trainer(
            AmpPrecision("bf16", weights="bf16"), 6, callbacks=[callback, after], val_check_interval=2
        )
        trainer.fit(model, data(6), data(1) if validate else None)
        return seen

    for validated, other in zip(run(validate=True), run(validate=False), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in validated.items())


def test_the_monitor_tells_bytes_a_parameter(caplog):
    monitor = AmpMonitor()
    fit(module(), AmpPrecision("bf16", weights="bf16"), steps=2, data=data(), callbacks=[monitor])
    each = monitor.weight_bytes.per_parameter()
    assert (each["weights"], each["masters"], each["gradients"]) == (2, 2, 4)
    assert each["optimizer_state"] == pytest.approx(8, rel=0.05)


def test_the_bytes_are_counted_once_a_step_was_taken():
    monitor, told = AmpMonitor(), []
    after = LambdaCallback(on_train_batch_end=lambda *_: told.append(monitor.weight_bytes))
    skips_two = OneWeight(overflow_at=(0, 1))
    skips_two.configure_optimizers = lambda: torch.optim.AdamW(skips_two.parameters())
    fit(skips_two, AmpPrecision("fp16"), steps=4, callbacks=[monitor, after])
    assert told[:2] == [None, None]
    assert told[2].optimizer_state >= 8 * told[2].parameters
    assert told[3] is told[2]


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [AmpPrecision, FabricAmpPrecision])
def test_options_of_lightning_are_checked(plugin):
    with pytest.raises(
        ValueError, match=r"weights='bfloat16' is not allowed; give .* did you mean weights='bf16'"
    ):
        plugin("bf16", weights="bfloat16")
    with pytest.raises(
        ValueError, match=r"weights='bf16' needs precision='bf16', not 'fp16': .* or weights='fp16'"
    ):
        plugin("fp16", weights="bf16")
    with pytest.raises(ValueError, match=r"weights='fp16' needs eval_precision='fp16', not 'fp32'"):
        plugin("fp16", weights="fp16", eval_precision="fp32")


@pytest.mark.parametrize("plugin", [AmpPrecision, FabricAmpPrecision])
@pytest.mark.parametrize(("given", "mine"), [("bf16-true", "bf16"), ("16-true", "fp16")])
def test_names_of_weights_in_16_bits_mean_stored_weights(plugin, given, mine):
    made = plugin(given)
    assert (made.settings.precision, made.settings.weights) == (mine, f"{mine}-true")
    assert repr(made) == f"{plugin.__name__}('{mine}', weights='{mine}-true')"
    assert made.settings.scales_loss is (mine == "fp16")
    assert plugin("bf16-true", weights="bf16-stochastic").settings.weights == "bf16-stochastic"
    with pytest.raises(ValueError, match=r"weights='fp16' needs precision='fp16', not 'bf16'"):
        plugin("bf16-true", weights="fp16")


def test_options_of_accelerate_are_checked_and_come_from_the_environment(monkeypatch):
    with pytest.raises(
        ValueError, match=r"needs mixed_precision='bf16', not 'fp16'.*weights comes from AmpKwargs"
    ):
        ours(precision="fp16", weights="bf16")
    with pytest.raises(
        ValueError, match="weights='half' is not allowed; .* mean weights='fp16'.*comes from AmpKwargs"
    ):
        ours(precision="fp16", weights="half")
    monkeypatch.setenv("AMP_PLUGIN_WEIGHTS", "bf16")
    model = nn.Linear(2, 2)
    ours(precision="bf16").prepare(model, torch.optim.SGD(model.parameters()))
    assert model.weight.dtype is torch.bfloat16


def test_fp32_modules_are_stored_in_float32():
    dtypes = {}
    keep = LambdaCallback(
        on_train_batch_end=lambda t, m, *_: dtypes.update({name: p.dtype for name, p in m.named_parameters()})
    )
    plugin = AmpPrecision("bf16", weights="bf16", fp32_modules=["net.2"])
    fit(module(), plugin, steps=2, data=data(), callbacks=[keep])
    assert dtypes["net.0.weight"] is torch.bfloat16
    assert dtypes["net.2.weight"] is torch.float32


def test_strategies_that_shard_are_refused():
    class FSDPStrategy(SingleDeviceStrategy):
        pass

    with pytest.raises(TypeError, match="weights='bf16' does not work on a sharded.*FSDPStrategy"):
        fit(OneWeight(), AmpPrecision("bf16", weights="bf16"), strategy=FSDPStrategy("cpu"))
    fit(OneWeight(), AmpPrecision("bf16"), strategy=FSDPStrategy("cpu"))
