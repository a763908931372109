"""Each known defect of stock Accelerate is shown in a program.

AmpAccelerator runs the same program without it.
"""

import copy
import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from tests.adapters.accelerate_pair import (
    GradientKeeper,
    Weights,
    last_gradient,
    ours,
    prepared,
    reset,
    stock,
)

OVERFLOW = 1e38  # infinite when multiplied by a scale of 8
ALREADY_UNSCALED = re.escape("unscale_() has already been called")
PRECISIONS = pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])


def defect(*, stock_gives, ours_gives, init_scale=8.0, **options):
    """Return a test that runs a program twice and checks stock Accelerate's result or error, and then ours."""

    def decorate(program):
        def test(*_):
            if isinstance(stock_gives, str):
                with pytest.raises((RuntimeError, AssertionError), match=stock_gives):
                    program(stock(init_scale=init_scale, **options))
            else:
                assert program(stock(init_scale=init_scale, **options)) == stock_gives
            result = program(ours(init_scale=init_scale, **options))
            assert result == ours_gives or result == pytest.approx(ours_gives, rel=1e-3)

        return test

    return decorate


def two_optimizers(accelerator, first=3.0, second=3.0, between=lambda *_: None):
    """Run one backward pass and step two optimizers. Return the gradients that each has used."""
    models, optimizers = prepared(accelerator, 2)
    accelerator.backward(models[0](first) + models[1](second))
    between(*models)
    for optimizer in optimizers:
        optimizer.step()
    return [last_gradient(opt) if opt.optimizer.seen else None for opt in optimizers]


def one_window(accelerator, factors, clip):
    """Clip after every micro-batch of an accumulation window: the program does not check ``sync_gradients``.

    Return the clip's result and the gradient.
    """
    (model,), (optimizer,) = prepared(accelerator)
    for factor in factors:
        with accelerator.accumulate(model):
            accelerator.backward(model(factor))
            result = clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return [*([] if result is None else [result.item()]), last_gradient(optimizer)]


# -- several optimizers ---------------------------------------------------------------------------


@defect(stock_gives=[3.0, 1.5], ours_gives=[3.0, 3.0], growth_interval=1)
def test_growth_between_the_steps(accelerator):
    return two_optimizers(accelerator)


@defect(stock_gives=[None, 6.0], ours_gives=[None, 3.0])
def test_overflow_of_the_first(accelerator):
    return two_optimizers(accelerator, first=OVERFLOW)


@defect(stock_gives=ALREADY_UNSCALED, ours_gives=[0.5, 0.5])
def test_clipping_both_after_a_joint_backward(accelerator):
    def clip(*models):
        norms = [accelerator.clip_grad_norm_(model.parameters(), 1.0).item() for model in models]
        assert norms == pytest.approx([6.0, 10.0])  # norms of four elements, each 3 or 5

    return two_optimizers(accelerator, second=5.0, between=clip)


# training stalls without an error
@defect(stock_gives=[3.0, 3.0 / 65536], ours_gives=[3.0, 3.0], init_scale=65536.0)
def test_clipping_one_destroys_the_other(accelerator):
    return two_optimizers(accelerator, between=lambda a, _: accelerator.clip_grad_norm_(a.parameters(), 1e9))


@defect(stock_gives="No inf checks were recorded", ours_gives=[3.0, None, False])
def test_an_optimizer_without_gradients(accelerator):
    (a, _), (opt_a, opt_b) = prepared(accelerator, 2)
    accelerator.backward(a(3.0))
    opt_a.step()
    opt_b.step()
    return [last_gradient(opt_a), opt_b.optimizer.seen[-1][0], opt_b.step_was_skipped]


def test_an_optimizer_that_was_not_prepared():
    def run(accelerator, prepares):
        (model, other), (optimizer, _) = prepared(accelerator, 2)
        late = accelerator.prepare_model(Weights())
        unprepared = torch.optim.SGD(late.parameters(), lr=1.0)
        unprepared = accelerator.prepare(unprepared) if prepares else unprepared
        for _ in range(2):
            optimizer.zero_grad()
            unprepared.zero_grad()
            accelerator.backward(model(3.0) + other(1.0) + late(5.0))
            optimizer.step()
            unprepared.step()
        return late.weight[0].item()

    assert run(stock(init_scale=8.0), prepares=False) == -80.0
    text = r"SGD.step\(\): .* multiplied by the loss scale.*accelerator.prepare"
    with pytest.raises(RuntimeError, match=text):
        run(ours(init_scale=8.0), prepares=False)
    assert run(ours(init_scale=8.0), prepares=True) == -10.0


def test_unscaled_by_hand_an_optimizer_need_not_be_prepared():
    accelerator = ours(init_scale=8.0)
    model = accelerator.prepare(Weights())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator.backward(model(3.0))
    model.weight.grad.div_(8.0)
    optimizer.step()
    assert model.weight[0].item() == -3.0
    accelerator.backward(model(3.0))
    accelerator.end_training()
    optimizer.step()  # training has ended, so this step is not checked


# -- clipping -------------------------------------------------------------------------------------


# the norm of four elements, each (2 + 6) / 2
@defect(stock_gives=ALREADY_UNSCALED, ours_gives=[8.0, 0.5], steps=2)
def test_by_norm_within_accumulate_without_a_guard(accelerator):
    return one_window(accelerator, [2.0, 6.0], lambda params: accelerator.clip_grad_norm_(params, 1.0))


@defect(stock_gives=ALREADY_UNSCALED, ours_gives=[-0.1], steps=2)  # not 0.25 - 1.1
def test_by_value_within_accumulate_without_a_guard(accelerator):
    return one_window(accelerator, [2.0, -2.2], lambda params: accelerator.clip_grad_value_(params, 0.25))


@defect(stock_gives=ALREADY_UNSCALED, ours_gives=[2.0, 0.5])
def test_value_then_norm(accelerator):
    (model,), (optimizer,) = prepared(accelerator)
    accelerator.backward(model(3.0))
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    norm = accelerator.clip_grad_norm_(optimizer, 1.0)  # our method also takes a prepared optimizer
    optimizer.step()
    return [norm.item(), last_gradient(optimizer)]


@defect(stock_gives=ALREADY_UNSCALED, ours_gives=3.0)
def test_unscale_gradients_may_be_repeated(accelerator):
    (model,), (optimizer,) = prepared(accelerator)
    accelerator.backward(model(3.0))
    for given in (None, optimizer, [optimizer]):
        accelerator.unscale_gradients(given)
    optimizer.step()
    return last_gradient(optimizer)


@PRECISIONS
def test_the_norm_within_a_window_is_that_of_the_gradients_so_far(precision):
    accelerator, norms = ours(steps=2, precision=precision), []
    result = one_window(
        accelerator,
        [2.0, 6.0],
        lambda params: norms.append(accelerator.clip_grad_norm_(params, 4.0).item()),
    )
    assert norms == pytest.approx([2.0, 8.0])
    assert result == pytest.approx([2.0])  # the mean of 2 and 6, halved by the clip
    (optimizer,) = accelerator._optimizers
    assert accelerator.last_step(optimizer).norm.item() == pytest.approx(8.0)


# -- skips ----------------------------------------------------------------------------------------


def test_an_overflow_holds_the_scheduler_back_fused_too(fused):
    def run(accelerator):
        model = Weights(value=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.backward(model(OVERFLOW))
        optimizer.step()
        schedule.step()
        unchanged = bool((model.weight == 1.0).all())
        return unchanged, accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0]

    told = (False, 0.5) if fused else (True, 1.0)  # huggingface/accelerate#4242
    assert run(stock(init_scale=8.0)) == (True, *told)
    assert run(ours(init_scale=8.0)) == (True, True, 1.0)


# the scheduler was held back once, when b overflowed
@defect(stock_gives=[True, 1.0], ours_gives=[False, 0.25])
def test_an_old_skip_of_an_idle_optimizer_stalls_schedulers_of_all(accelerator):
    (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
    foreign = torch.optim.SGD(Weights().parameters(), lr=1.0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(foreign, 0.5))
    foreign.step()  # torch's schedulers warn unless the optimizer has stepped
    accelerator.backward(b(OVERFLOW))
    opt_b.step()
    for _ in range(3):
        accelerator.backward(a(1.0))
        opt_a.step()
        schedule.step()
        opt_a.zero_grad()
    return [accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0]]


def test_which_parameter_overflowed_is_known_by_name():
    accelerator = ours(init_scale=8.0)
    (a, b), optimizers = prepared(accelerator, 2)
    other = Weights()  # its model is not prepared, so the name begins with the class and has no number
    optimizers += (accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1.0)),)
    accelerator.backward(a(1.0) + b(OVERFLOW) + other(OVERFLOW))
    for optimizer in optimizers:
        optimizer.step()
    reports = [accelerator.last_step(optimizer).overflow_report() for optimizer in optimizers]
    assert not reports[0]
    names = ("Weights[1].weight",), ("Weights.weight",)
    assert tuple(report.inf for report in reports[1:]) == names
    accelerator.scaler.end_iteration()
    assert accelerator.amp_metrics() == {"loss_scale": 4.0, "skipped_steps": 2}


def test_metrics_are_read_between_two_steps_and_change_no_gradient():
    accelerator = ours(init_scale=8.0, growth_interval=1)
    (a, b), optimizers = prepared(accelerator, 2)
    accelerator.backward(a(1.0) + b(1.0))
    optimizers[0].step()  # requests an update, which waits for the step of the other optimizer
    before = b.weight.grad.tolist()
    assert accelerator.amp_metrics() == {"loss_scale": 8.0, "skipped_steps": 0}
    assert b.weight.grad.tolist() == before
    optimizers[1].step()
    assert accelerator.amp_metrics()["loss_scale"] == 16.0


@PRECISIONS
def test_any_precision_tells_of_its_steps(precision):
    accelerator = ours(precision=precision, init_scale=8.0, steps=2)
    (model,), (optimizer,) = prepared(accelerator)
    for value in (3.0, 5.0):
        with accelerator.accumulate(model):
            with pytest.raises(RuntimeError, match="has not stepped"):
                accelerator.last_step(optimizer)
            accelerator.backward(model(value))
            optimizer.step()
    scale = 8.0 if precision == "fp16" else 1.0
    for given in (optimizer, optimizer.optimizer):
        result = accelerator.last_step(given)
        assert (result.skipped, result.scale_before, result.scale_after) == (False, scale, scale)
        assert not result.overflow_report()
        assert result.norm.item() == 8.0
    assert optimizer.scaler is accelerator.scaler
    assert (accelerator.scaler is None) is (precision != "fp16")
    metrics = accelerator.amp_metrics()
    assert metrics == {"loss_scale": scale, "skipped_steps": 0}
    assert type(metrics["skipped_steps"]) is int
    assert copy.deepcopy(optimizer).step_was_skipped is False


# -- closures -------------------------------------------------------------------------------------


@defect(stock_gives=24.0, ours_gives=3.0)
def test_a_closure_steps_on_unscaled_gradients(accelerator):
    (model,), (optimizer,) = prepared(accelerator)

    def closure():
        optimizer.zero_grad()
        loss = model(3.0)
        accelerator.backward(loss)
        return loss

    closure()  # torch's scaler needs gradients before the step
    optimizer.step(closure)
    return last_gradient(optimizer)


@PRECISIONS
def test_it_returns_the_loss_and_runs_at_the_end_of_a_window_only(precision):
    accelerator = ours(precision=precision, init_scale=8.0, steps=2)
    (model,), (optimizer,) = prepared(accelerator)

    def closure():
        accelerator.backward(model(3.0))
        return "loss"

    for expected in (None, "loss"):
        with accelerator.accumulate(model):
            assert optimizer.step(closure) == expected
    assert last_gradient(optimizer) == 1.5


def test_lomo_is_left_to_accelerate(precision):
    Lomo = type("Lomo", (GradientKeeper,), {"__module__": "lomo_optim.lomo"})
    accelerator = ours(precision=precision)
    model = Weights()
    model, optimizer = accelerator.prepare(model, Lomo(model.parameters()))
    accelerator.backward(model(3.0))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"


def test_fp16_on_the_cpu_is_fp16():
    def run(accelerator):
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        probe = torch.full((1, 4), 1.0 + 2.0**-12)  # rounds to 1 in fp16
        return (model(probe) == model(torch.ones(1, 4))).all().item(), accelerator.scaler is not None

    reset()
    assert run(Accelerator(mixed_precision="fp16", cpu=True)) == (False, False)
    for precision, expected in {"fp16": (True, True), "bf16": (True, False), "no": (False, False)}.items():
        assert run(ours(precision=precision)) == expected


@defect(stock_gives=[24.0], ours_gives=[3.0])
def test_hooks_of_a_fused_optimizer_see_unscaled_gradients(accelerator):
    model, seen = Weights(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad[0].item()))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(3.0))
    optimizer.step()
    return seen


@pytest.mark.parametrize("in_window", [True, False])
def test_an_iteration_ends_with_accumulate_or_when_all_have_stepped(in_window):
    """This includes optimizers that were prepared one by one."""
    accelerator = ours(init_scale=8.0, growth_interval=1)
    a, b = (accelerator.prepare_model(Weights()) for _ in range(2))
    opt_a, opt_b = (accelerator.prepare_optimizer(GradientKeeper(model.parameters())) for model in (a, b))

    def begin():
        accelerator.backward(a(3.0) + b(3.0))
        opt_a.step()
        # unchanged, because b has not stepped with its gradients yet; get_scale() would apply the update
        assert accelerator.scaler.loss_scale.item() == 8.0

    if in_window:
        with accelerator.accumulate(a, b):
            begin()
        assert accelerator.scaler.get_scale() == 16.0
    else:
        begin()
    opt_b.step()
    assert (last_gradient(opt_a), last_gradient(opt_b)) == (3.0, 3.0)
    assert accelerator.scaler.get_scale() == (32.0 if in_window else 16.0)


def test_threads_of_gloo_drop_their_tensors_before_the_group_ends(monkeypatch):
    """Without this, stock Accelerate sometimes ends with "terminate called without an active exception"."""

    def run(accelerator):
        ready, dropped, seen = threading.Lock(), threading.Event(), []
        monkeypatch.setattr(dist, "destroy_process_group", lambda _: seen.append(dropped.is_set()))
        ready.acquire()
        gloo = threading.Thread(target=lambda: (ready.acquire(), dropped.set()))
        gloo.start()
        ready.release()  # from here on the thread only needs the GIL
        accelerator.end_training()
        gloo.join()
        return seen

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        assert run(stock()) == [False]
        assert run(ours()) == [True]
    finally:
        sys.setswitchinterval(interval)
