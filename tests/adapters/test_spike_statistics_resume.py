"""The running mean of spikes is in the checkpoint of each entry point, in fp16 and in bf16, and resumes from it."""

import pytest
import torch
from ignite.engine import Engine
from lightning.fabric import Fabric

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.ignite import IgnitePrecision
from amp_plugin.adapters.lightning import AmpPrecision, FabricAmpPrecision
from tests.adapters.accelerate_pair import reset
from tests.adapters.lightning_models import QUIET, make_trainer
from tests.adapters.test_poisoned_batches import Learner, batches, network

pytestmark = QUIET
OPTIONS = {"init_scale": 64.0, "on_spike": {"window": 8, "warmup": 4}}
DATA = batches(drop=True)


def statistics(scaler):
    return scaler.core.shared.spikes.state_dict()["spikes"]


class Plain(Learner):
    def training_step(self, batch, batch_idx):
        """A loader that starts over in a resumed epoch would repeat batches."""
        return super().training_step(DATA[self.trainer.global_step], batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(precision, file, *, resume):
    plugin = AmpPrecision(precision, **OPTIONS)
    loader = torch.utils.data.DataLoader(DATA, batch_size=None)
    run = make_trainer(plugin, max_steps=10 if resume else 8)
    run.fit(Plain(torch.optim.AdamW, fused=False), loader, ckpt_path=file if resume else None)
    if not resume:
        run.save_checkpoint(file)
    return statistics(plugin.session.scaler)


def fabric(precision, file, *, resume):
    plugin = FabricAmpPrecision(precision, **OPTIONS)
    runs, net = Fabric(accelerator="cpu", devices=1, plugins=[plugin]), network()
    model, optimizer = runs.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "precision": plugin}
    if resume:
        runs.load(file, state)
    for x in DATA[8:10] if resume else DATA[:8]:
        optimizer.zero_grad()
        runs.backward(model(x).square().mean())
        optimizer.step()
    if not resume:
        runs.save(file, state)
    return statistics(plugin.session.scaler)


def accelerate(precision, file, *, resume):
    reset()
    accelerator = AmpAccelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[AmpKwargs(**OPTIONS)])
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if resume:
        accelerator.load_state(file)
    for x in DATA[8:10] if resume else DATA[:8]:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        accelerator.save_state(file)
    return statistics(accelerator.session.scaler)


def ignite(precision, file, *, resume):
    amp, net = IgnitePrecision(precision, **OPTIONS), network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def update(engine, x):
        optimizer.zero_grad()
        with amp.region():
            loss = net(x).square().mean()
        amp.backward(loss)
        amp.step(optimizer)

    runs = Engine(update)
    amp.attach(runs, net, optimizer)
    saved = {"model": net, "optimizer": optimizer, "amp": amp}
    if resume:
        for name, state in torch.load(file, weights_only=True).items():
            saved[name].load_state_dict(state)
    runs.run(DATA[8:10] if resume else DATA[:8])
    if not resume:
        torch.save({name: one.state_dict() for name, one in saved.items()}, file)
    return statistics(amp.session.scaler)


def whole(precision):
    """Return the statistics after 8 and after 10 steps of a plain loop."""
    from amp_plugin import GradScaler, autocast

    net, scaler = network(), GradScaler("cpu", enabled=precision == "fp16", **OPTIONS)
    optimizer, seen = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    for x in DATA[:10]:
        optimizer.zero_grad()
        with autocast("cpu", dtype=dtype):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(statistics(scaler))
    return seen[7], seen[9]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("door", [trainer, fabric, accelerate, ignite], ids=lambda door: door.__name__)
def test_a_resumed_run_goes_on_with_the_saved_statistics(door, precision, tmp_path):
    file = str(tmp_path / "checkpoint")
    after_eight, after_ten = whole(precision)
    assert door(precision, file, resume=False) == after_eight
    assert door(precision, file, resume=True) == after_ten
