"""Invariant 2: a step with a non-finite gradient changes nothing, with a loss scale and without."""

import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import OPTIMIZERS, build, everything, scaler_of

BATCHES = 20


def train(scaler, cls, options, poisoned, poison=1.0, clip=None, drop=False):
    """Train on twenty batches, one of which is poisoned or left out.

    Return all numbers, and the results of the steps.
    """
    model, optimizer = build(cls, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(1)
    results = []
    for i in range(BATCHES):
        x = torch.randn(2, 4, generator=generator) * (poison if i == poisoned else 1.0)
        if i == poisoned and drop:
            continue
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
        results.append(scaler.last_step(optimizer))
        if not results[-1].skipped:
            schedule.step()
    params, state = everything(model, optimizer)
    return params + state, [result.skipped for result in results]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize(("clip", "poison"), [(None, math.nan), (None, -math.inf), (0.1, math.inf)])
@pytest.mark.parametrize("poisoned", [0, 7])
def test_a_poisoned_batch_leaves_what_a_dropped_one_leaves(cls, options, poisoned, clip, poison, scale):
    """If torch's fused SGD skips its first step, it allocates momentum buffers and leaves them uninitialized.

    Ours must not.
    """
    numbers, skipped = train(scaler_of(scale, dynamic=False), cls, options, poisoned, poison, clip)
    right, _ = train(scaler_of(scale, dynamic=False), cls, options, poisoned, clip=clip, drop=True)
    assert all(map(torch.equal, numbers, right))
    assert all(number.isfinite().all() for number in numbers)
    assert skipped == [i == poisoned for i in range(BATCHES)]


@pytest.mark.parametrize("mended", [True, False])
def test_gradients_that_are_mended_or_spoilt_after_a_clip_has_seen_them(weights, scale, mended):
    """The gradients at the step count.

    With a loss scale, an overflow that a clip has seen stays one, as in torch.amp.
    """
    one, scaler = weights(), scaler_of(scale)
    scaler.register(one.optimizer)
    one.backward(scaler, math.nan if mended else 1.0)
    scaler.clip_grad_norm_(one.optimizer, 100.0)
    for param in one.params:
        param.grad.data.nan_to_num_(1.0) if mended else param.grad.data.fill_(math.nan)
    scaler.step(one.optimizer)
    taken = mended and scale is None
    assert scaler.last_step(one.optimizer).skipped is not taken
    assert one.value == -float(taken)


@pytest.mark.parametrize("order", [0.0, -1.0])
def test_orders_whose_norm_hides_a_nan_are_read(weights, order, scale):
    one, scaler = weights(), scaler_of(scale)
    one.backward(scaler)
    one.params[0].grad[0] = math.inf
    scaler.clip_grad_norm_(one.optimizer, 1e9, order)
    scaler.step(one.optimizer)
    assert scaler.last_step(one.optimizer).skipped


def test_raise_names_the_parameters_and_leaves_the_weights(weights):
    one, scaler = weights(), scaler_of(None, on_nonfinite="raise")
    scaler.register(one.optimizer, names={"a.weight": one.params[0]})
    (one.params[0].sum() * math.nan).backward()
    with pytest.raises(FloatingPointError, match=r"SGD: .* not finite \(nan in 1 gradient: a\.weight"):
        scaler.step(one.optimizer)
    assert one.value == 0.0
    assert scaler.last_step(one.optimizer).skipped


def test_raise_waits_for_the_loss_scale(weights):
    """While the scale is above 1, overflows are expected, because the scaler is looking for the right scale."""
    one, scaler = weights(), GradScaler("cpu", init_scale=4.0, on_nonfinite="raise")
    one.train(scaler, math.inf, math.inf)
    with pytest.raises(FloatingPointError, match=r"are not finite \(inf in 3 gradients.*'skip' goes on"):
        one.train(scaler, math.inf)
    for scale, text in ((4.0, "4"), (2.0**20, "1048576")):
        constant = GradScaler("cpu", init_scale=scale, dynamic=False, on_nonfinite="raise")
        with pytest.raises(FloatingPointError, match=rf"are not finite at a loss scale of {text} \(inf"):
            one.train(constant, math.inf)


def test_ignore_is_torchs_step(weights):
    one, scaler = weights(), scaler_of(None, on_nonfinite="ignore")
    one.train(scaler, math.nan)
    assert all(param.isnan().all() for param in one.params)
    assert (scaler.last_step(one.optimizer).skipped, scaler.skipped_steps()) == (False, 0)
    assert GradScaler("cpu", on_nonfinite="ignore").is_enabled()


@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_a_run_that_only_skips_says_so_once(weights, fused, scale):
    one, scaler = weights(fused=fused), scaler_of(scale)
    one.train(scaler, *[math.inf] * 49, 1.0, *[math.inf] * 49)
    why = "although nothing is scaled" if scale is None else "lowering it further will not help"
    text = rf"50 steps of SGD in a row were skipped.*inf in 3 gradients: param_groups.*{why}.*amp-plugin diagnose"
    with pytest.warns(UserWarning, match=text):
        one.train(scaler, math.inf)
    one.train(scaler, *[math.inf] * 100)  # one run is enough
