"""Does ignite's engine train, skip, clip, save and log in mixed precision as a plain torch.amp loop does?"""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

pytest.importorskip("ignite")

from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint
from ignite.metrics import Loss

from amp_plugin import OptionError
from amp_plugin.adapters.ignite import IgnitePrecision
from amp_plugin.scaling.words import PLAIN

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))


def batches(count=6, poisoned=()):
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)
    ]
    for place in poisoned:
        made[place][0].fill_(math.inf)
    return made


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(precision, data, *, every=1, max_norm=None, init_scale=2.0**10):
    """Train in a plain loop with torch.autocast and torch.amp.GradScaler."""
    model = network()
    optimizer, scaler = (
        sgd(model),
        torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=precision == "fp16"),
    )
    losses = []
    for place, (x, y) in enumerate(data, start=1):
        with torch.autocast("cpu", DTYPES[precision]):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss / every).backward()
        if place % every == 0:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, scaler.get_scale()


def mse(prediction, target):
    """Return the mean squared error. With torch 2.11, its backward fails for a bfloat16 prediction."""
    return nn.functional.mse_loss(prediction.float(), target)


def trained(amp, data, epochs=1):
    model = network()
    optimizer = sgd(model)
    trainer = amp.create_supervised_trainer(model, optimizer, mse)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(data, max_epochs=epochs)
    return losses, model, optimizer, trainer


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_it_trains_as_a_loop_by_hand(precision, max_norm, every):
    expected, reference, _ = by_hand(precision, batches(), every=every, max_norm=max_norm)
    amp = IgnitePrecision(
        precision, init_scale=2.0**10, one_pass=False, max_norm=max_norm, gradient_accumulation_steps=every
    )
    losses, model, optimizer, _ = trained(amp, batches())
    assert losses == expected
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        # the two clips differ in the last bits
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert max_norm is not None or same(model, reference)
    assert amp.last_step(optimizer).norm > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_overflow_is_skipped_and_the_schedulers_sit_it_out(precision):
    amp, data = IgnitePrecision(precision, init_scale=2.0**10), batches(poisoned=[2])
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = amp.create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    told = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        amp.step_scheduler(scheduler)
        told.append(
            (amp.last_step(optimizer).skipped, optimizer.param_groups[0]["lr"], dict(engine.state.metrics))
        )

    trainer.run(data, max_epochs=1)
    assert [skipped for skipped, *_ in told] == [place == 2 for place in range(6)]
    assert [rate for _, rate, _ in told] == [0.05, 0.025, 0.025, 0.0125, 0.00625, 0.003125]
    assert [metrics["skipped_steps"] for *_, metrics in told] == [0, 0, 1, 1, 1, 1]
    assert told[1][2]["grad_norm"] > 0
    scales = [metrics.get("loss_scale") for *_, metrics in told]
    assert scales == ([1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0] if precision == "fp16" else [None] * 6)
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_checkpoint_resumes_the_loss_scale_and_the_count(tmp_path):
    first = IgnitePrecision("fp16", init_scale=2.0**10)
    _, model, optimizer, trainer = trained(first, batches(poisoned=[1]))
    saver = Checkpoint(
        {"model": model, "optimizer": optimizer, "trainer": trainer, "amp": first}, str(tmp_path), n_saved=1
    )
    saver(trainer)
    (file,) = tmp_path.iterdir()

    resumed = IgnitePrecision("fp16")
    model2 = network()
    optimizer2 = sgd(model2)
    trainer2 = resumed.create_supervised_trainer(model2, optimizer2, nn.functional.mse_loss)
    objects = {"model": model2, "optimizer": optimizer2, "trainer": trainer2, "amp": resumed}
    Checkpoint.load_objects(objects, torch.load(file, weights_only=False))
    assert resumed.scaler.get_scale() == 512.0
    trainer.run(batches(), max_epochs=2)
    trainer2.run(batches(), max_epochs=2)
    assert same(model, model2)
    assert trainer2.state.metrics["skipped_steps"] == 1
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict({key: first.state_dict()[key] for key in torchs.state_dict()})
    assert torchs.get_scale() == first.scaler.get_scale()
    with pytest.warns(UserWarning, match="written in another precision; its scale is ignored"):
        IgnitePrecision("bf16").load_state_dict(first.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))])
def test_a_copy_goes_on_by_itself_from_the_same_scale(copied):
    amp = IgnitePrecision("fp16", init_scale=2.0**10, growth_interval=2)
    trained(amp, batches(5, poisoned=[1]))
    twin = copied(amp)
    before = amp.state_dict()
    assert twin.state_dict() == before
    assert twin.options == amp.options
    losses, *_ = trained(twin, batches(3))
    assert all(map(math.isfinite, losses))
    assert twin.skipped_steps == 1
    assert amp.state_dict() == before


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16-true"])
def test_an_evaluator_computes_in_its_precision_and_gives_float32(weights):
    amp = IgnitePrecision("bf16", weights=weights)
    _, model, _, _ = trained(amp, batches())
    assert all(
        param.dtype is torch.float32 for param in model.parameters()
    )  # float32 weights are restored at the end of the run
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    evaluator = create_supervised_evaluator(
        model, {"loss": Loss(nn.functional.mse_loss)}, model_fn=amp.model_fn
    )
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.output[0].dtype))
    evaluator.run(batches(1))
    assert seen == [torch.float32 if weights == "bf16-true" else torch.bfloat16, torch.float32]
    assert math.isfinite(evaluator.state.metrics["loss"])


@pytest.mark.native  # own rules need the native core
def test_stored_weights_and_rules_hold_for_the_run_only():
    amp = IgnitePrecision(
        "bf16", weights="bf16", rules={"device_type": "cpu", "rules": {"aten::linear": "fp32"}}
    )
    model, seen = network(), []
    optimizer = sgd(model)
    trainer = amp.create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    model[0].register_forward_hook(
        lambda module, args, output: seen.append((module.weight.dtype, output.dtype))
    )
    trainer.run(batches(1), max_epochs=1)
    assert seen == [(torch.bfloat16, torch.float32)]
    assert model[0].weight.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batches(1)[0][0]).dtype is torch.bfloat16


def test_an_update_function_of_ones_own():
    amp, model = IgnitePrecision("fp16", init_scale=2.0**10, one_pass=False), network()
    optimizer = sgd(model)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        with amp.region():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        amp.step(optimizer)
        return loss.item()

    trainer = Engine(update)
    amp.attach(trainer, model, optimizer)
    trainer.run(batches(), max_epochs=1)
    _, reference, _ = by_hand("fp16", batches())
    assert same(model, reference)


def test_a_run_that_only_skips_ends_with_the_words_of_its_user():
    amp = IgnitePrecision("fp16", max_skips_in_a_row=3)
    with pytest.raises(
        RuntimeError, match=r"3 steps.*IgnitePrecision\('bf16'\).*IgnitePrecision\(max_skips_in_a_row"
    ):
        trained(amp, batches(poisoned=range(6)))
    with pytest.warns(UserWarning, match="no optimizer step was taken"):
        amp.end()


def test_a_terminated_run_gives_everything_back():
    amp, model = IgnitePrecision("bf16", weights="bf16"), network()
    trainer = amp.create_supervised_trainer(model, sgd(model), nn.functional.mse_loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    trainer.run(batches(), max_epochs=1)
    assert model[0].weight.dtype is torch.float32
    trainer.run(batches(), max_epochs=1)  # the run can be started again
    assert trainer.state.metrics["skipped_steps"] == 0


def test_options_are_checked_and_the_environment_sets_them(monkeypatch):
    with pytest.raises(OptionError, match="max_norm=-1 is not allowed"):
        IgnitePrecision(max_norm=-1)
    with pytest.raises(
        TypeError, match=r"IgnitePrecision: unknown option 'max_nrm'; did you mean max_norm\?"
    ):
        IgnitePrecision(max_nrm=1.0)
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "256")
    assert IgnitePrecision("fp16").scaler.get_scale() == 256.0
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "-1")
    with pytest.raises(OptionError, match=r"init_scale comes from AMP_PLUGIN_INIT_SCALE"):
        IgnitePrecision("fp16")
    assert IgnitePrecision.words != PLAIN
