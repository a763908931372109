"""Models that are loaded in 16 bits, or store their weights in 16 bits, train in every framework as in
float32.
"""

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

from amp_plugin import AmpPrecision, FabricAmpPrecision
from amp_plugin.precision import TRAINING_DTYPES
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import QUIET, Linear, OneWeight, fit, make_trainer

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:.*are float32 now:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
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
    """Return the weights in float32. For stored weights these are the exact values, not the rounded ones."""
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


def share_moved(before, after):
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before])
    return moved.float().mean().item()


def in_trainer(model, weights, precision="bf16"):
    fit(model, AmpPrecision(precision, weights=weights), steps=STEPS, data=data())
    return model


def fabric_of(net, precision="bf16", lr=1e-2, **options):
    """Set up a network with Fabric. Return Fabric, the network and its optimizer."""
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision(precision, **options))
    return fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0))


def accelerate_of(net, precision="bf16", lr=1e-2, **options):
    accelerator = ours(precision=precision, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    return accelerator, *accelerator.prepare(net, optimizer)


def train(frame, net, optimizer, batches=None):
    for x, y in data() if batches is None else batches:
        optimizer.zero_grad()
        frame.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()


def in_fabric(model, weights, precision="bf16"):
    train(*fabric_of(model.net, precision, LR, weights=weights))
    return model


def in_accelerate(model, weights, precision="bf16"):
    train(*accelerate_of(model.net, precision, LR, weights=weights))
    return model


PROGRAMS = [in_trainer, in_fabric, in_accelerate]


@pytest.mark.parametrize(
    ("precision", "weights"), [*(("bf16", way) for way in WAYS), ("fp16", "fp32"), ("fp16", "fp16")]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_that_comes_in_16_bits_moves_wholly(program, precision, weights):
    half = TRAINING_DTYPES[precision]
    model = module().to(half)
    before = values(model)
    moved = share_moved(before, values(program(model, weights, precision)))
    if weights == "bf16-stochastic":
        assert moved > 0.1, "each weight moves with the probability of its update"
    else:
        assert moved == 1.0 if precision == "bf16" else moved > 0.9
    gives_back = weights == "fp32" or program is in_trainer
    assert model.net[0].weight.dtype is (torch.float32 if gives_back else half)


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_line_says_what_became_float32(program):
    model = module().bfloat16()
    model.net[0].bias.requires_grad_(False)
    (line,) = [told for told in warnings_of(lambda: program(model, "fp32")) if "float32 now" in told]
    assert line.startswith("3 parameters came in bf16 and are float32 now")
    assert "weights='bf16' keeps them in 16 bits" in line
    assert model.net[0].bias.dtype is torch.bfloat16, "frozen ones stay"


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_an_optimizer_of_weights_that_are_made_later_is_told_of_once():
    fabric = Fabric(accelerator="cpu", plugins=FabricAmpPrecision("bf16"))
    net = fabric.setup_module(module().net)
    loose = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    made = torch.optim.AdamW([*net.parameters(), loose], lr=LR)
    (line,) = warnings_of(lambda: fabric.setup_optimizers(made).step())
    assert line.startswith("AdamW steps 1 parameters in 16 bits, so updates below 1/256 of a parameter")
    assert warnings_of(made.step) == []


def test_nothing_is_converted_where_nothing_casts():
    model, accelerator = module().bfloat16(), ours(precision="no")
    with pytest.warns(
        UserWarning, match="SGD steps 4 parameters in 16 bits, so updates below 1/256 of a parameter"
    ):
        accelerator.prepare(model.net, torch.optim.SGD(model.net.parameters(), lr=0.1))
    assert model.net[0].weight.dtype is torch.bfloat16


# -- checkpoints ----------------------------------------------------------------------------------


class Recorded(Linear):
    """A module that keeps the exact weights that training starts with."""

    def on_train_start(self):
        self.started = values(self)


def recorded():
    return Recorded(torch.optim.AdamW, lr=1e-2)


def trainer_run(folder, steps, resume=False, model=None, callbacks=(), precision="bf16", **options):
    """Train and save after step 4, or resume from that checkpoint.

    Return the weights before and after training.
    """
    model = model or recorded()
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(
        AmpPrecision(precision, **options),
        steps,
        enable_checkpointing=True,
        callbacks=[*callbacks, checkpoint],
    )
    # equal batches, because a resumed Trainer starts again with the epoch's first batch
    same = [next(iter(data(1)))] * 20
    trainer.fit(
        model, DataLoader(same, batch_size=None), ckpt_path=folder / "step=4.ckpt" if resume else None
    )
    return model.started, values(model)


def run_of(set_up, save, load):
    def run(folder, steps, resume=False, **options):
        frame, net, optimizer = set_up(inner := recorded().net, **options)
        if resume:
            load(frame, folder, {"model": net, "optimizer": optimizer})
        started, batches = values(inner), list(data(20))
        train(frame, net, optimizer, batches[4 * resume : min(steps, 4 + 4 * resume)])
        if not resume:
            save(frame, folder, {"model": net, "optimizer": optimizer})
            train(frame, net, optimizer, batches[4:steps])
        return started, values(inner)

    return run


def with_scale(fabric, state):
    return {**state, "precision": fabric.strategy.precision}


fabric_run = run_of(
    fabric_of,
    save=lambda fabric, folder, state: fabric.save(folder / "state.ckpt", with_scale(fabric, state)),
    load=lambda fabric, folder, state: fabric.load(folder / "state.ckpt", with_scale(fabric, state)),
)
accelerate_run = run_of(
    accelerate_of,
    save=lambda accelerator, folder, _: accelerator.save_state(folder),
    load=lambda accelerator, folder, _: accelerator.load_state(folder),
)
RUNS = [trainer_run, fabric_run, accelerate_run]
MOMENTS = [("fp32", "8bit"), ("bf16", "8bit"), ("bf16", "bf16")]
FORMS = {
    **{way: {"weights": way} for way in WAYS},
    **{f"{way}, moments in {form}": {"weights": way, "state": form} for way, form in MOMENTS},
    "fp16 from a scale that overflows": {"precision": "fp16", "init_scale": 2.0**20, "growth_interval": 3},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_ends_in_the_same_bits(run, form, tmp_path):
    _, whole = run(tmp_path, 8, **FORMS[form])
    reset()
    _, resumed = run(tmp_path, 8, resume=True, **FORMS[form])
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("run", RUNS)
def test_the_other_way_of_storing_loads_without_losing_a_bit(run, first, second, tmp_path):
    _, saved = run(tmp_path, 4, weights=first)
    reset()
    loaded, _ = run(tmp_path, 5, resume=True, weights=second)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    for path in tmp_path.glob("step=4.ckpt"):
        states = torch.load(path, weights_only=True)
        assert states["state_dict"]["net.0.weight"].dtype is torch.float32
        assert states["optimizer_states"][0]["state"][0]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_model_that_comes_in_bfloat16_resumes_all_bits(weights, averaged, tmp_path):
    def run(*, resume):
        average = [EMAWeightAveraging(decay=0.9)] if averaged else []
        model = Recorded(torch.optim.AdamW, lr=1e-3).bfloat16()
        return trainer_run(tmp_path, 8, resume, model, average, weights=weights)[1]

    whole, resumed = run(resume=False), run(resume=True)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_an_average_is_of_masters_and_is_what_training_leaves(weights):
    decay, expected, seen = 0.9, {}, {}

    class Kept(Linear):
        def on_train_batch_end(self, *_):
            for name, value in values(self).items():
                first = name not in expected
                expected[name] = value if first else torch.lerp(expected[name], value, 1 - decay)

    callback = EMAWeightAveraging(decay=decay)
    keep = LambdaCallback(on_train_batch_end=lambda *_: seen.update(values(callback._average_model.module)))
    model = Kept(torch.optim.AdamW, lr=1e-4).bfloat16()
    fit(model, AmpPrecision("bf16", weights=weights), steps=8, data=data(), callbacks=[callback, keep])
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-8)
        assert torch.equal(values(model)[name], seen[name])
    assert not any(name.startswith("on_") for name in vars(callback)), "its hooks are its own again"


def test_stochastic_weight_averaging_averages_masters():
    ends = []

    class Kept(Linear):
        def on_train_epoch_end(self):
            ends.append(values(self))

    model = Kept(torch.optim.AdamW, lr=1e-5).bfloat16()
    swa = StochasticWeightAveraging(swa_lrs=1e-5, swa_epoch_start=2, annealing_epochs=1)
    plugin = AmpPrecision("bf16", weights="bf16")
    fit(model, plugin, steps=-1, max_epochs=4, data=data(4), callbacks=[swa])
    for name, value in values(model).items():
        # the weights at the start of epochs 1 to 3
        mean = torch.stack([epoch[name] for epoch in ends[:-1]]).double().mean(0)
        assert (value - mean).abs().max() <= 1e-7, name


def test_a_validation_on_averages_gives_the_weights_back():
    def run(validate):
        model, seen = Linear(torch.optim.AdamW, lr=1e-3), []
        if validate:
            model.validation_step = lambda *_: None
        after = LambdaCallback(on_train_batch_end=lambda t, m, *_: seen.append(values(m)))
        averaging = [EMAWeightAveraging(decay=0.9), after]
        plugin = AmpPrecision("bf16", weights="bf16")
        make_trainer(plugin, 6, callbacks=averaging, val_check_interval=2).fit(
            model, data(6), data(1) if validate else None
        )
        return seen

    for validated, other in zip(run(validate=True), run(validate=False), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in validated.items())


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
    accelerator, net, optimizer = accelerate_of(model := recorded().net, weights="bf16")
    train(accelerator, net, optimizer, data(4))
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


# -- options --------------------------------------------------------------------------------------


FRONTS = [
    AmpPrecision,
    FabricAmpPrecision,
    lambda precision, **options: ours(precision=precision, **options),
]


@pytest.mark.parametrize("front", FRONTS, ids=["trainer", "fabric", "accelerate"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "half"}, "weights='half' is not allowed; .* mean weights='fp16'"),
        ({"weights": "bf16"}, r"weights='bf16' needs \w+='bf16', not 'fp16': .* or weights='fp16'"),
        ({"weights": "fp16", "eval_precision": "fp32"}, "needs eval_precision='fp16', not 'fp32'"),
    ],
)
def test_options_are_checked(front, given, message):
    with pytest.raises(ValueError, match=message):
        front("fp16", **given)


@pytest.mark.parametrize("plugin", [AmpPrecision, FabricAmpPrecision])
@pytest.mark.parametrize(("given", "mine"), [("bf16-true", "bf16"), ("16-true", "fp16")])
def test_names_of_weights_in_16_bits_mean_stored_weights(plugin, given, mine):
    settings = plugin(given).settings
    assert (settings.precision, settings.weights) == (mine, f"{mine}-true")
    assert (plugin(given).scaler is not None) is (mine == "fp16")
    assert repr(plugin(given)) == f"{plugin.__name__}('{mine}', weights='{mine}-true')"
    assert plugin("bf16-true", weights="bf16-stochastic").settings.weights == "bf16-stochastic"


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_fp32_modules_compute_and_are_stored_in_float32(weights):
    dtypes = {}

    class Watching(Linear):
        def training_step(self, batch, index):
            hidden = self.net[0](batch[0])
            dtypes.update(hidden=hidden.dtype, out=self.net[2](hidden).dtype)
            dtypes.update({name: param.dtype for name, param in self.named_parameters()})
            return super().training_step(batch, index)

    fit(Watching(), AmpPrecision("bf16", weights=weights, fp32_modules=["net.2"]), data=data())
    assert (dtypes["hidden"], dtypes["out"]) == (torch.bfloat16, torch.float32)
    assert dtypes["net.0.weight"] is (torch.bfloat16 if weights == "bf16" else torch.float32)
    assert dtypes["net.2.weight"] is torch.float32
    with pytest.raises(ValueError, match="LayerNorm"):
        fit(Linear(), AmpPrecision(fp32_modules=["LayerNorm"]), data=data())


def test_strategies_that_shard_are_refused():
    class FSDPStrategy(SingleDeviceStrategy):
        mixed_precision_config = None

    with pytest.raises(TypeError, match="weights='bf16' does not work with FSDP1.*the strategy's mixed_prec"):
        fit(OneWeight(), AmpPrecision("bf16", weights="bf16"), strategy=FSDPStrategy("cpu"))
    fit(OneWeight(), AmpPrecision("bf16"), strategy=FSDPStrategy("cpu"))
