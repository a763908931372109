"""Each defect of stock Accelerate, with its numbers, and AmpAccelerator right in the same program."""

import copy
import math
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

OVERFLOW = 1e38  # times a scale of 8 it is infinite


def run_two_optimizers(accelerator, first=3.0, second=3.0):
    """One joint backward, then both step: the gradients each has seen."""
    (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
    accelerator.backward(a(first) + b(second))
    opt_a.step()
    opt_b.step()
    return [opt.optimizer.seen[-1][0][0].item() if opt.optimizer.seen else None for opt in (opt_a, opt_b)]


class TestSeveralOptimizers:
    def test_growth_between_the_steps(self):
        assert run_two_optimizers(stock(init_scale=8.0, growth_interval=1)) == [3.0, 1.5]
        assert run_two_optimizers(ours(init_scale=8.0, growth_interval=1)) == [3.0, 3.0]

    def test_overflow_of_the_first(self):
        assert run_two_optimizers(stock(init_scale=8.0), first=OVERFLOW) == [None, 6.0]
        assert run_two_optimizers(ours(init_scale=8.0), first=OVERFLOW) == [None, 3.0]

    def test_clipping_both_after_a_joint_backward(self):
        def run(accelerator):
            (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
            accelerator.backward(a(3.0) + b(5.0))
            norms = [accelerator.clip_grad_norm_(model.parameters(), 1.0) for model in (a, b)]
            opt_a.step()
            opt_b.step()
            return [norm.item() for norm in norms], last_gradient(opt_a), last_gradient(opt_b)

        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            run(stock(init_scale=8.0))
        norms, a, b = run(ours(init_scale=8.0))
        assert norms == pytest.approx([6.0, 10.0])  # four elements of 3 and of 5
        assert (a, b) == pytest.approx((0.5, 0.5))

    def test_clipping_one_destroys_the_other(self):
        def run(accelerator):
            (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
            accelerator.backward(a(3.0) + b(3.0))
            accelerator.clip_grad_norm_(a.parameters(), 1e9)
            opt_a.step()
            opt_b.step()
            return last_gradient(opt_a), last_gradient(opt_b)

        assert run(stock(init_scale=8.0)) == (3.0, 3.0 / 8)
        assert run(stock(init_scale=65536.0)) == (3.0, 3.0 / 65536)  # training stalls, no error
        assert run(ours(init_scale=8.0)) == (3.0, 3.0)

    def test_an_optimizer_that_was_not_prepared(self):
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
        with pytest.raises(
            RuntimeError, match=r"SGD.step\(\): .* multiplied by the loss scale.*accelerator.prepare"
        ):
            run(ours(init_scale=8.0), prepares=False)
        assert run(ours(init_scale=8.0), prepares=True) == -10.0

    def test_the_prepared_one_is_not_the_one_that_steps(self):
        accelerator = ours(init_scale=8.0)
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, _ = accelerator.prepare(model, optimizer)
        accelerator.backward(model(3.0))
        with pytest.raises(RuntimeError, match=r"past the scaler.* in Accelerate"):
            optimizer.step()

    def test_unscaled_by_hand_an_optimizer_need_not_be_prepared(self):
        accelerator = ours(init_scale=8.0)
        model = accelerator.prepare(Weights())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accelerator.backward(model(3.0))
        model.weight.grad.div_(8.0)
        optimizer.step()
        assert model.weight[0].item() == -3.0
        accelerator.backward(model(3.0))
        accelerator.end_training()
        optimizer.step()  # nobody looks any more


class TestClipping:
    def test_torchs_clip_of_scaled_gradients(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)
            for _ in range(3):
                optimizer.zero_grad()
                accelerator.backward(model(3.0))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            return last_gradient(optimizer)

        assert run(stock(init_scale=65536.0)) == pytest.approx(0.5 / 65536)  # training stalls, no error
        with pytest.raises(RuntimeError, match=r"norm, 1: .* in Accelerate accelerator.clip_grad_norm_\(\)"):
            run(ours(init_scale=65536.0))

    def test_by_norm_within_accumulate_without_a_guard(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)
            for factor in (2.0, 6.0):
                with accelerator.accumulate(model):
                    accelerator.backward(model(factor))
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            return norm.item(), last_gradient(optimizer)

        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            run(stock(init_scale=8.0, steps=2))
        assert run(ours(init_scale=8.0, steps=2)) == pytest.approx((8.0, 0.5))  # (2 + 6) / 2, four times

    def test_by_value_within_accumulate_without_a_guard(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)
            for factor in (2.0, -2.2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(factor))
                    accelerator.clip_grad_value_(model.parameters(), 0.25)
                    optimizer.step()
            return last_gradient(optimizer)

        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            run(stock(init_scale=8.0, steps=2))
        assert run(ours(init_scale=8.0, steps=2)) == pytest.approx(-0.1, rel=1e-3)  # not 0.25 - 1.1

    def test_value_then_norm(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)
            accelerator.backward(model(3.0))
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return norm.item(), last_gradient(optimizer)

        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            run(stock(init_scale=8.0))
        assert run(ours(init_scale=8.0)) == pytest.approx((2.0, 0.5))

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_the_norm_within_a_window_is_that_of_the_gradients_so_far(self, precision):
        accelerator = ours(steps=2, precision=precision)
        (model,), (optimizer,) = prepared(accelerator)
        norms = []
        for factor in (2.0, 6.0):
            with accelerator.accumulate(model):
                accelerator.backward(model(factor))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
                optimizer.step()
        assert norms == pytest.approx([2.0, 8.0])
        assert last_gradient(optimizer) == pytest.approx(4.0)
        result = accelerator.last_step(optimizer)
        assert result.norm.item() == pytest.approx(8.0)

    def test_a_prepared_optimizer_may_be_named(self):
        accelerator = ours(init_scale=8.0)
        (model,), (optimizer,) = prepared(accelerator)
        accelerator.backward(model(3.0))
        assert accelerator.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(6.0)

    def test_an_overflow_gives_an_infinite_norm_and_a_skip(self):
        accelerator = ours(init_scale=8.0)
        (model,), (optimizer,) = prepared(accelerator)
        accelerator.backward(model(OVERFLOW))
        assert math.isinf(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        assert optimizer.step_was_skipped
        assert optimizer.optimizer.seen == []

    @pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
    def test_parameters_of_no_optimizer_are_refused(self, call):
        accelerator = ours(init_scale=8.0)
        (model,), _ = prepared(accelerator)
        stray = Weights()
        accelerator.backward(model(3.0) + stray(1.0))
        text = rf"{call}\(\): 1 of the 2 parameters .* no prepared optimizer.*scale.*accelerator\.prepare\(optimizer\)"
        params = [*model.parameters(), *stray.parameters()]
        with pytest.raises(RuntimeError, match=text):
            getattr(accelerator, call)(params, 1.0)
        accelerator.prepare(torch.optim.SGD(stray.parameters(), lr=1.0))
        getattr(accelerator, call)(params, 1.0)

    def test_a_float16_parameter_is_refused_by_name(self):
        accelerator = ours(init_scale=8.0)
        (model,), (optimizer,) = prepared(accelerator)
        model.half()
        accelerator.backward(model(3.0))
        with pytest.raises(ValueError, match="Parameter 'weight' is float16"):
            optimizer.step()

    def test_unscale_gradients_may_be_repeated(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)
            accelerator.backward(model(3.0))
            accelerator.unscale_gradients()
            accelerator.unscale_gradients(optimizer)
            accelerator.unscale_gradients([optimizer])
            optimizer.step()
            return last_gradient(optimizer)

        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            run(stock(init_scale=8.0))
        assert run(ours(init_scale=8.0)) == 3.0


class TestSkips:
    @pytest.mark.parametrize("fused", [False, True])
    def test_an_overflow_holds_the_scheduler_back_fused_too(self, fused):
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

    def test_an_old_skip_of_an_idle_optimizer_stalls_schedulers_of_all(self):
        def run(accelerator):
            (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
            foreign = torch.optim.SGD(Weights().parameters(), lr=1.0)
            schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(foreign, 0.5))
            foreign.step()  # as torch's schedulers demand
            accelerator.backward(b(OVERFLOW))
            opt_b.step()
            for _ in range(3):
                accelerator.backward(a(1.0))
                opt_a.step()
                schedule.step()
                opt_a.zero_grad()
            return accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0]

        assert run(stock(init_scale=8.0)) == (True, 1.0)
        skipped, rate = run(ours(init_scale=8.0))
        assert not skipped
        assert rate == 0.25  # held back once: in the iteration in which b overflowed

    def test_two_schedulers_at_the_end_each_follow_their_own_optimizer(self):
        accelerator = ours(init_scale=8.0)
        models = [Weights(), Weights()]
        optimizers = [GradientKeeper(model.parameters()) for model in models]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
        prepared_ = accelerator.prepare(*models, *optimizers, *schedules)
        (a, b), (opt_a, opt_b), schedules = prepared_[:2], prepared_[2:4], prepared_[4:]
        for factor in (OVERFLOW, 1.0):
            for model, optimizer, scale in ((a, opt_a, factor), (b, opt_b, 1.0)):
                optimizer.zero_grad()
                accelerator.backward(model(scale))
                optimizer.step()
            for schedule in schedules:
                schedule.step()
        assert [schedule.get_last_lr()[0] for schedule in schedules] == [0.5, 0.25]

    def test_a_critic_stepped_several_times_a_generator_once(self):
        accelerator = ours(init_scale=8.0, growth_interval=1)
        (critic, generator), (opt_critic, opt_generator) = prepared(accelerator, 2)
        for _ in range(2):
            for _ in range(3):
                opt_critic.zero_grad()
                accelerator.backward(critic(3.0))
                opt_critic.step()
            opt_generator.zero_grad()
            accelerator.backward(generator(5.0) + critic(3.0))
            opt_generator.step()
        assert {float(grads[0][0]) for grads in opt_critic.optimizer.seen} == {3.0}
        assert [float(grads[0][0]) for grads in opt_generator.optimizer.seen] == [5.0, 5.0]

    def test_which_parameter_overflowed_is_known_by_name(self):
        accelerator = ours(init_scale=8.0)
        (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
        accelerator.backward(a(1.0) + b(OVERFLOW))
        opt_a.step()
        opt_b.step()
        assert accelerator.last_step(opt_b).overflow_report().inf == ("Weights[1].weight",)
        assert not accelerator.last_step(opt_a).overflow_report()
        accelerator.scaler.end_iteration()
        assert accelerator.amp_metrics() == {"loss_scale": 4.0, "skipped_steps": 1}

    def test_an_optimizer_whose_model_is_not_prepared_has_no_names(self):
        accelerator = ours(init_scale=8.0)
        prepared(accelerator)
        other = Weights()
        optimizer = accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1.0))
        accelerator.backward(other(OVERFLOW))
        optimizer.step()
        assert accelerator.last_step(optimizer).overflow_report().inf == ("param_groups[0]['params'][0]",)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_any_precision_tells_of_its_steps(self, precision):
        accelerator = ours(precision=precision, init_scale=8.0, steps=2)
        (model,), (optimizer,) = prepared(accelerator)
        raw = optimizer.optimizer
        for value in (3.0, 5.0):
            with accelerator.accumulate(model):
                with pytest.raises(RuntimeError, match="has not stepped"):
                    accelerator.last_step(optimizer)
                accelerator.backward(model(value))
                optimizer.step()
        for given in (optimizer, raw):
            result = accelerator.last_step(given)
            scale = 8.0 if precision == "fp16" else 1.0
            assert (result.skipped, result.scale_before, result.scale_after) == (False, scale, scale)
            assert not result.overflow_report()
            assert result.norm.item() == 8.0
        assert optimizer.scaler is accelerator.scaler
        assert (accelerator.scaler is None) is (precision != "fp16")
        metrics = accelerator.amp_metrics()
        assert metrics == {"loss_scale": scale, "skipped_steps": 0}
        assert type(metrics["skipped_steps"]) is int
        assert copy.deepcopy(optimizer).step_was_skipped is False


class TestClosures:
    def test_a_closure_steps_on_unscaled_gradients(self):
        def run(accelerator):
            (model,), (optimizer,) = prepared(accelerator)

            def closure():
                optimizer.zero_grad()
                loss = model(3.0)
                accelerator.backward(loss)
                return loss

            closure()  # torch's scaler demands gradients first
            optimizer.step(closure)
            return last_gradient(optimizer)

        assert run(stock(init_scale=8.0)) == 24.0
        assert run(ours(init_scale=8.0)) == 3.0

    def test_lbfgs_reaches_the_minimum(self):
        accelerator = ours(init_scale=2.0**10)
        target = torch.tensor([1.0, -2.0])
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=20)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs = torch.eye(2)

        def closure():
            optimizer.zero_grad()
            loss = ((model(inputs).squeeze() - target) ** 2).sum()
            accelerator.backward(loss)
            return loss

        for _ in range(3):
            assert optimizer.step(closure) is not None
        assert model.weight.detach().squeeze().tolist() == pytest.approx([1.0, -2.0], abs=1e-2)

    @pytest.mark.parametrize("drops", [False, True])
    def test_an_overflow_earlier_in_the_window(self, drops):
        accelerator = ours(init_scale=8.0, steps=2)
        model = torch.nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=1))
        losses = []

        def closure():
            if drops:
                optimizer.zero_grad()
            losses.append(model(torch.ones(1, 1)).sum() ** 2)
            accelerator.backward(losses[-1])
            return losses[-1]

        for factor in (float("inf"), 1.0):
            with accelerator.accumulate(model):
                if factor != 1.0:
                    accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
                loss = optimizer.step(closure)
        assert (loss is losses[0]) is drops
        assert accelerator.last_step(optimizer).skipped is not drops
        assert accelerator.scaler.get_scale() == (8.0 if drops else 4.0)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_the_loss_is_returned_in_any_precision(self, precision):
        (model,), (optimizer,) = prepared(accelerator := ours(precision=precision))

        def closure():
            accelerator.backward(model(3.0))
            return "loss"

        assert optimizer.step(closure) == "loss"
        assert last_gradient(optimizer) == 3.0

    def test_no_closure_runs_within_a_window(self):
        accelerator = ours(init_scale=8.0, steps=2)
        (model,), (optimizer,) = prepared(accelerator)
        with accelerator.accumulate(model):
            assert optimizer.step(lambda: pytest.fail("closure called")) is None


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_lomo_is_left_to_accelerate(precision):
    Lomo = type("Lomo", (GradientKeeper,), {"__module__": "lomo_optim.lomo"})
    accelerator = ours(precision=precision)
    model = Weights()
    model, optimizer = accelerator.prepare(model, Lomo(model.parameters()))
    accelerator.backward(model(3.0))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"


def test_an_optimizer_without_gradients():
    def run(accelerator):
        (a, _b), (opt_a, opt_b) = prepared(accelerator, 2)
        accelerator.backward(a(3.0))
        opt_a.step()
        opt_b.step()
        return last_gradient(opt_a), opt_b.optimizer.seen[-1], opt_b.step_was_skipped

    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        run(stock(init_scale=8.0))
    assert run(ours(init_scale=8.0)) == (3.0, [None], False)


def test_fp16_on_the_cpu_is_fp16():
    def run(accelerator):
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        dtypes = []
        model.register_forward_hook(lambda *_: dtypes.append(torch.is_autocast_enabled("cpu")))
        probe = torch.full((1, 4), 1.0 + 2.0**-12)  # rounds to 1 in fp16
        return (model(probe) == model(torch.ones(1, 4))).all().item(), accelerator.scaler is not None

    reset()
    assert run(Accelerator(mixed_precision="fp16", cpu=True)) == (False, False)
    assert run(ours(precision="fp16")) == (True, True)
    assert run(ours(precision="bf16")) == (True, False)
    assert run(ours(precision="no")) == (False, False)


def test_windows_of_several_micro_batches_keep_one_scale():
    accelerator = ours(init_scale=8.0, growth_interval=1, steps=4)
    (model,), (optimizer,) = prepared(accelerator)
    scales = []
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(2.0))
            scales.append(accelerator.scaler.get_scale())
            optimizer.step()
            optimizer.zero_grad()
    assert scales == [8.0] * 4 + [16.0] * 4
    assert [float(grads[0][0]) for grads in optimizer.optimizer.seen] == [2.0, 2.0]
    assert accelerator.scaler.get_scale() == 32.0


class TestGradientPenalty:
    """The loss ``output + 0.5 * |d output / d weight|^2`` of a model whose output is ``factor * w^2 / 2``."""

    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0]))

        def forward(self, factor):
            return (factor * self.weight.square() / 2).sum()

    def step(self, accelerator, penalty_of, factor=3.0):
        model = self.Square()
        model, optimizer = accelerator.prepare(model, GradientKeeper(model.parameters()))
        output = model(factor)
        penalty = penalty_of(accelerator, output, model.weight)
        accelerator.backward(output + 0.5 * penalty)
        optimizer.step()
        return penalty.item(), last_gradient(optimizer)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
    def test_in_one_line(self, precision):
        accelerator = ours(precision=precision)
        penalty, grad = self.step(accelerator, lambda amp, out, weight: amp.gradient_penalty(out, weight))
        assert (penalty, grad) == (36.0, 6.0 + 18.0)  # w * 3, and its half square's derivative 9 * w

    def test_grad_is_unscaled(self):
        accelerator = ours(init_scale=8.0)
        model = accelerator.prepare(self.Square())
        (grad,) = accelerator.grad(model(3.0), model.weight, create_graph=True)
        assert grad.item() == 6.0


@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "clip_grad_value_"])
def test_loss_backward_before_any_scaled_backward_is_named(call):
    accelerator = ours()
    (model,), (optimizer,) = prepared(accelerator)
    model(3.0).backward()
    calls = {
        "step": optimizer.step,
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
    }
    with pytest.raises(RuntimeError, match=rf"{call}\(\) before any .*write accelerator\.backward\(loss\)"):
        calls[call]()


def test_hooks_of_a_fused_optimizer_see_unscaled_gradients():
    def run(accelerator):
        model, seen = Weights(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad[0].item()))
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(3.0))
        optimizer.step()
        return seen

    assert run(stock(init_scale=8.0)) == [24.0]
    assert run(ours(init_scale=8.0)) == [3.0]


def test_leaving_accumulate_ends_the_iteration():
    accelerator = ours(init_scale=8.0, growth_interval=1)
    (a, b), (opt_a, opt_b) = prepared(accelerator, 2)
    with accelerator.accumulate(a, b):
        accelerator.backward(a(3.0) + b(3.0))
        opt_a.step()
        assert accelerator.scaler.get_scale() == 8.0  # b's gradients wait for their step
    assert accelerator.scaler.get_scale() == 16.0
    opt_b.step()
    assert last_gradient(opt_b) == 3.0


def test_optimizers_prepared_one_by_one_are_known_too():
    accelerator = ours(init_scale=8.0, growth_interval=1)
    a, b = (accelerator.prepare_model(Weights()) for _ in range(2))
    opt_a, opt_b = (accelerator.prepare_optimizer(GradientKeeper(model.parameters())) for model in (a, b))
    accelerator.backward(a(3.0) + b(3.0))
    opt_a.step()
    assert accelerator.scaler.get_scale() == 8.0  # b's gradients wait for their step
    opt_b.step()
    assert accelerator.scaler.get_scale() == 16.0
    assert (last_gradient(opt_a), last_gradient(opt_b)) == (3.0, 3.0)


class TestEndOfTheRun:
    def test_threads_of_gloo_drop_their_tensors_before_the_group_ends(self, monkeypatch):
        """Stock ends a run at times with "terminate called without an active exception"."""

        def run(accelerator):
            ready, dropped, seen = threading.Lock(), threading.Event(), []
            monkeypatch.setattr(dist, "destroy_process_group", lambda _: seen.append(dropped.is_set()))
            ready.acquire()
            gloo = threading.Thread(target=lambda: (ready.acquire(), dropped.set()))
            gloo.start()
            ready.release()  # the thread has all it needs but the GIL
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
