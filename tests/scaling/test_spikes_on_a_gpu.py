"""On a GPU, spikes are judged in one launch without a wait for the device. A log adds neither."""

import contextlib

import pytest
import torch

from amp_plugin import GradScaler, Spike, SpikeError
from tests.host_device import host_device
from tests.scaling.device_waits import waits_are_errors

pytestmark = pytest.mark.gpu

PLANTED, STEPS = 9, 14
RULE = {"window": 8, "warmup": 6}


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def plain(params):
    return torch.optim.Adadelta(params, lr=0.01)


def train(optimizer, device, *, clip=None, planted=True, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    stepper = optimizer(model.parameters())
    scaler = GradScaler(device, init_scale=2.0**8, growth_interval=100, **options)
    launches, kept = [], {}
    for step in range(STEPS):
        x = torch.rand(16, 8, generator=torch.Generator().manual_seed(step)) + 0.5
        x = (x * (30.0 if step == PLANTED and planted else 1.0)).to(device)
        stepper.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        watch = device == "cuda" and host_device.LOADED
        if watch:
            torch.ops.host_device.launched()
        if clip is None:
            scaler.step(stepper)
        else:
            scaler.clip_and_step(stepper, clip)
        launches.append(torch.ops.host_device.launched() if watch else [])
        scaler.update()
        kept[step] = scaler.last_step(stepper)
    verdicts = [kept[step].verdict for step in range(STEPS)]
    return [p.detach().cpu() for p in model.parameters()], verdicts, launches


@pytest.mark.parametrize("action", ["skip", "clip"])
@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("optimizer", [sgd, fused_adamw, plain])
def test_a_spike_is_judged_as_on_the_cpu(optimizer, clip, action):
    rule = Spike(action=action, **RULE)
    ours, verdicts, _ = train(optimizer, "cuda", clip=clip, on_spike=rule)
    theirs, expected, _ = train(optimizer, "cpu", clip=clip, on_spike=rule)
    assert verdicts == expected == ["spike" if step == PLANTED else "landed" for step in range(STEPS)]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not host_device.LOADED, reason="the device made of host memory counts launches")
@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("optimizer", [sgd, fused_adamw])
def test_on_spike_is_one_launch_and_a_log_is_none(optimizer, clip):
    got = []
    bare = train(optimizer, "cuda", clip=clip)[2]
    logged = train(optimizer, "cuda", clip=clip, log=got.append)[2]
    judged = train(optimizer, "cuda", clip=clip, on_spike=Spike(**RULE))[2]
    assert logged == bare
    assert len(got) > STEPS // 2
    for before, after in zip(bare[1:], judged[1:], strict=True):
        assert sorted(after) == sorted([*before, "judge_step"])


@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("optimizer", [sgd, fused_adamw])
@pytest.mark.parametrize("action", ["skip", "clip", "raise"])
def test_neither_waits_for_the_device(optimizer, clip, action):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).cuda()
    stepper = optimizer(model.parameters())
    got = []
    scaler = GradScaler("cuda", init_scale=2.0**8, on_spike=Spike(action=action, **RULE), log=got.append)
    x = torch.ones(16, 8, device="cuda")

    def step():
        stepper.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if clip is None:
            scaler.step(stepper)
        else:
            scaler.clip_and_step(stepper, clip)
        scaler.update()

    step()
    torch.cuda.synchronize()
    with waits_are_errors():
        for _ in range(10):
            step()
    torch.cuda.synchronize()
    step()
    assert {record.verdict for record in got} == {"landed"}


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw])
def test_weights_are_held_from_a_spike_until_it_is_raised(optimizer):
    """The host may learn of a spike some steps late. The steps queued in the meantime change nothing."""
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
        stepper = optimizer([weight])
        scaler = GradScaler("cuda", init_scale=2.0**8, on_spike=Spike(action="raise", **RULE))
        before, taken = None, 0
        with pytest.raises(SpikeError) as caught:  # noqa: PT012 - which step raises is the device's to say
            for step in range(400):
                if step == PLANTED:
                    before = weight.detach().clone()
                noise = torch.rand(64, generator=torch.Generator().manual_seed(step)) + 0.5
                stepper.zero_grad()
                scaler.scale((weight * noise.cuda()).sum() * (50.0 if step == PLANTED else 1.0)).backward()
                scaler.step(stepper)
                scaler.update()
                taken = step
        assert taken >= PLANTED - 1
        assert caught.value.value > caught.value.limit
        assert torch.equal(weight.detach().cpu(), before.cpu())
        stepper.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(stepper)
        scaler.update()
        scaler.core.log.read(wait=True)
        assert scaler.last_step(stepper).verdict == "landed"
        assert not torch.equal(weight.detach().cpu(), before.cpu())
