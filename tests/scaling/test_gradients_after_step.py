"""After ``scaler.step()``, ``.grad`` has the value that torch.amp leaves: unscaled and clipped."""

import itertools

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import Run

SCALE = 2.0**10
MAX_NORM = 0.1
FLAGS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
UNSUPPORTED = {("adagrad", "fused")}  # torch's fused Adagrad does not support loss scales
CLIPS = ("none", "by torch", "by ours", "in the step")


def pairs_of(*kinds):
    return [pair for pair in itertools.product(kinds, FLAGS) if pair not in UNSUPPORTED]


def training(cls, kind, flags="plain", **options):
    return Run(kind, scaler=cls("cpu", init_scale=SCALE, **options), **FLAGS[flags])


def both(kind, flags):
    """Do the same under our scaler and under torch's."""
    return [training(cls, kind, flags) for cls in (GradScaler, torch.amp.GradScaler)]


def step(run, clip):
    """Take a step. If ours clips, torch's scaler is used with torch's clip."""
    if clip == "by torch" or (clip != "none" and not isinstance(run.scaler, GradScaler)):
        run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.params, MAX_NORM)
    elif clip == "in the step":
        run.scaler.clip_and_step(run.optimizer, MAX_NORM)
        return
    elif clip != "none":
        run.scaler.clip_grad_norm_(run.optimizer, MAX_NORM)
    run.scaler.step(run.optimizer)


def assert_close(ours, right, **options):
    torch.testing.assert_close(ours, right, **{"rtol": 1e-6, "atol": 0, **options})


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("kind", "flags"), pairs_of("sgd", "momentum", "adam", "adamw", "adagrad", "maximize")
)
def test_a_taken_step_leaves_the_gradients_of_torch_amp(kind, flags, clip):
    ours, theirs = runs = both(kind, flags)
    for seed in range(3):
        for run in runs:
            run.backward(seed)
            step(run, clip)
        assert not ours.scaler.last_step(ours.optimizer).skipped
        assert_close(ours.gradients(), theirs.gradients())
        for run in runs:
            run.scaler.update()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("clip", ["none", "by ours", "in the step"])
@pytest.mark.parametrize(("kind", "flags"), pairs_of("sgd", "adamw", "adagrad"))
def test_a_skipped_step_leaves_unscaled_gradients(kind, flags, clip, bad):
    """They are as torch.amp's after unscale_().

    This includes fused optimizers, for which torch leaves gradients scaled if unscale_() was not called.
    """
    ours, theirs = runs = both(kind, flags)
    for run in runs:
        run.step()  # so that the optimizer has state
        run.backward(1)
        run.params[1].grad[2] = bad
    theirs.scaler.unscale_(theirs.optimizer)
    step(ours, clip), step(theirs, "none")
    assert ours.scaler.last_step(ours.optimizer).skipped
    assert_close(ours.gradients(), theirs.gradients(), equal_nan=True)


@pytest.mark.parametrize("clip", ["by ours", "in the step"])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("bad", [None, torch.inf])
def test_where_nothing_is_scaled_a_clip_is_written_too(kind, clip, bad):
    run = training(GradScaler, kind, enabled=False)
    run.backward()
    if bad is not None:
        run.params[1].grad[2] = bad
    before = run.gradients()
    step(run, clip)
    assert run.scaler.last_step(run.optimizer).skipped is (bad is not None)
    factor = 1.0 if bad is not None else MAX_NORM / (torch.nn.utils.get_total_norm(before) + 1e-6)
    assert_close(run.gradients(), [grad * factor for grad in before])


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_rounded_once(dtype):
    param = torch.nn.Parameter(torch.ones(3, 5))
    param.grad_dtype = dtype
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu", init_scale=1000.0, fp16_gradients=True)
    scaler.scale((param * torch.randn(3, 5) * 0.01).sum()).backward()
    scaled = param.grad.clone()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).one_pass
    assert param.grad.dtype is dtype
    assert torch.equal(param.grad, (scaled.float() / 1000.0).to(dtype))


HIDDEN = {
    "data": lambda param, value: param.grad.data.copy_(value),
    "numpy": lambda param, value: param.grad.numpy().__setitem__(..., value.numpy()),
    "no write": lambda param, value: None,
    "visible": lambda param, value: param.grad.copy_(value),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("write", HIDDEN)
@pytest.mark.parametrize(("kind", "flags"), pairs_of("sgd", "adamw", "adagrad"))
def test_gradients_used_again_after_an_update_are_scaled_ones(kind, flags, write, clip):
    """Replayed graphs, ``.data``, NumPy and collectives write gradients without a change of the version
    counter.
    """
    ours, theirs = runs = both(kind, flags)
    for run in runs:
        run.backward()
        run.scaler.unscale_(run.optimizer)  # so that both continue from the same gradients
        run.scaler.step(run.optimizer)
        run.scaler.update()
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(param.shape, generator=generator) * SCALE for param in ours.params]
    for _ in range(2):
        for run in runs:
            for param, value in zip(run.params, values, strict=True):
                HIDDEN[write](param, value)
            step(run, clip)
        assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-7)
        assert_close(ours.gradients(), theirs.gradients(), rtol=1e-5)
        for run in runs:
            run.scaler.update()


def test_a_hook_after_the_step_sees_unscaled_gradients():
    run, seen = training(GradScaler, "adamw", "fused"), []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(run.gradients()))
    run.backward()
    run.scaler.unscale_(run.optimizer)
    expected = run.gradients()
    run.scaler.update()
    run.step()
    assert_close(seen[0], expected)
