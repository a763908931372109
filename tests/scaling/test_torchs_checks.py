"""torch.amp's own checks next to ours: a misuse that torch refuses is refused here too, and some it does not see."""

import gc
import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.ops_seen import OpsSeen
from tests.scaling.runs import fresh

BOTH = pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])


@BOTH
@pytest.mark.parametrize("unscales", [False, True])
def test_a_forgotten_update_is_an_error_at_the_second_step(weights, scaler_class, unscales):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    one.backward(scaler)
    scaler.step(one.optimizer)
    one.backward(scaler)
    call = scaler.unscale_ if unscales else scaler.step
    text = r"called after step\(\)" if unscales else r"step\(\) has already been called since the last update"
    with pytest.raises(RuntimeError, match=text):
        call(one.optimizer)
    assert one.value == -1.0
    scaler.update()
    scaler.step(one.optimizer)
    assert one.value == -2.0


def test_a_forgotten_update_of_a_closure(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0), weights(optimizer=torch.optim.LBFGS)

    def closure():
        one.backward(scaler)
        return one.loss()

    scaler.scale(one.loss())
    scaler.step(one.optimizer, closure)
    with pytest.raises(RuntimeError, match=r"Call update\(\) once per iteration"):
        scaler.step(one.optimizer, closure)


def test_a_forgotten_update_of_two_optimizers(weights):
    """A critic may step again before its generator, which torch refuses; once both have, an update is due."""
    critic, generator = weights(), weights()
    scaler = fresh(critic.optimizer, generator.optimizer)
    for one in (critic, critic, generator):
        one.backward(scaler)
        scaler.step(one.optimizer)
    critic.backward(scaler)
    with pytest.raises(RuntimeError, match="register"):
        scaler.step(critic.optimizer)


@BOTH
def test_an_update_after_a_step_past_the_scaler_is_an_error(weights, scaler_class):
    scaler, one = scaler_class("cpu", init_scale=8.0), weights()
    one.backward(scaler)
    one.optimizer.step()
    wanted = AssertionError if scaler_class is torch.amp.GradScaler else RuntimeError
    with pytest.raises(wanted, match=r"(?i)no (inf checks were|gradient was check)"):
        scaler.update()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"momentum": 0.9}])
@BOTH
def test_a_step_past_the_scaler_with_scaled_gradients(weights, scaler_class, options):
    """torch.amp steps with gradients eight times too large."""
    one, scaler = weights(**options), scaler_class("cpu", init_scale=8.0)
    one.train(scaler, 1.0)
    one.backward(scaler)
    if scaler_class is torch.amp.GradScaler:
        one.optimizer.step()
        assert one.value <= -9.0
        return
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) is called past the scaler.*scaler.unscale_"):
        one.optimizer.step()
    assert one.value == -1.0
    scaler.unscale_(one.optimizer)  # as it is right
    one.optimizer.step()
    assert one.value <= -2.0


def test_a_loss_that_was_not_scaled_steps_past_the_scaler(weights):
    one = weights()
    scaler = fresh(one.optimizer)
    one.train(scaler, 1.0)
    one.optimizer.zero_grad()
    one.loss().backward()
    one.optimizer.step()
    assert one.value == -2.0
    del scaler
    gc.collect()
    assert not one.optimizer._optimizer_step_pre_hooks, "a scaler that is gone leaves nothing behind"


@BOTH
@pytest.mark.parametrize("fold", [False, True])
def test_finite_gradients_whose_norm_overflows_are_clipped_to_zero(weights, scaler_class, fold):
    one, scaler = weights(optimizer=torch.optim.AdamW, fused=True), scaler_class("cpu", init_scale=1.0)
    one.backward(scaler, 3e38)
    if scaler_class is GradScaler:
        norm = scaler.clip_grad_norm_(one.optimizer, 1.0, fold=fold)
    else:
        scaler.unscale_(one.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(one.params, 1.0)
    scaler.step(one.optimizer)
    assert (norm.item(), one.grad) == (torch.inf, 0.0)
    assert len(one.optimizer.state) == len(one.params), "the step was taken"


# -- scaled gradients that torch's function clips ---------------------------------------------------


def small_training(scaler, edit, *, steps=6, micro_batches=1, fused=True, dtype=torch.float16):
    """Return how far the weights have moved; ``edit`` gets the scaler, parameters and optimizer before each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
    start = torch.nn.utils.parameters_to_vector(params).detach()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype):
                loss = (model(torch.randn(32, 8)) - 1).square().mean()
            scaler.scale(loss).backward()
        edit(scaler, params, optimizer)
        scaler.step(optimizer)
        scaler.update()
    return (torch.nn.utils.parameters_to_vector(params) - start).norm().item()


def clipped(
    limit=lambda scaler: 0.5, *, before=lambda scaler, optimizer: None, clip=torch.nn.utils.clip_grad_norm_
):
    """An edit: torch clips, after another call."""

    def edit(scaler, params, optimizer):
        before(scaler, optimizer)
        clip(params, limit(scaler))

    return edit


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scaled_gradients_that_torch_has_clipped(fused, micro_batches):
    """torch.amp trains on, 65536 times too slowly."""
    options = {"micro_batches": micro_batches, "fused": fused}
    assert small_training(torch.amp.GradScaler("cpu"), clipped(), **options) < 1e-4
    wanted = r"3 steps in a row with one norm, 0.5: .*Call scaler.unscale_.*accelerator.clip_grad_norm_\(\)"
    with pytest.raises(RuntimeError, match=wanted):
        small_training(GradScaler("cpu"), clipped(), **options)


@pytest.mark.parametrize("max_norm", [0.1, 0.25, 1.0, 1.5, 5, 10])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**16, 2.0**20])
def test_each_usual_max_norm_is_seen(max_norm, init_scale):
    with pytest.raises(RuntimeError, match="clip_grad_norm_ of torch"):
        small_training(
            GradScaler("cpu", init_scale=init_scale), clipped(lambda _: max_norm), dtype=torch.bfloat16
        )


def test_clipped_scaled_gradients_are_seen_across_skips_and_updates():
    scaler, scales = GradScaler("cpu", init_scale=2.0**14, growth_interval=1), []

    def clip(scaler, params, optimizer):
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        scales.append(scaler.get_scale())
        if len(scales) == 2:
            params[0].grad[0, 0] = torch.inf

    with pytest.raises(RuntimeError, match="clip_grad_norm_ of torch"):
        small_training(scaler, clip, dtype=torch.bfloat16)
    assert len(scales) == 4
    assert len(set(scales)) > 1


def each_gradient(edit):
    def apply(scaler, params, optimizer):
        for param in params:
            param.grad = edit(param.grad)

    return apply


def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)


def set_scale(value):
    return lambda scaler, optimizer: scaler.update(value)


RIGHT_EDITS = {
    "averaged over ranks": each_gradient(lambda grad: grad.div_(8)),
    "averaged to next to nothing": each_gradient(lambda grad: grad.div_(2**20)),
    "centralized": each_gradient(lambda grad: grad.sub_(grad.mean())),
    "replaced": each_gradient(lambda grad: grad / 2),
    "noise": each_gradient(lambda grad: grad.add_(torch.randn_like(grad))),
    "a layer frozen": each_gradient(lambda grad: grad.mul_(grad.dim() == 1)),
    "clipped to max_norm * scale": clipped(lambda scaler: 1e-3 * scaler.get_scale()),
    "round by chance": clipped(lambda scaler: 1.0 + int(scaler._growth_tracker) % 2),
    "clipped to max_norm * 16": clipped(lambda _: 5e-3 * 16.0, before=set_scale(16.0)),
    "clipped at a scale of 64, perhaps on purpose": clipped(lambda _: 1.0, before=set_scale(64.0)),
    "clipped to inf": clipped(lambda _: torch.inf),
    "unscaled, then clipped": clipped(lambda _: 1e-3, before=unscale),
    "unscaled, then clipped by value": clipped(lambda _: 1e-5, before=unscale, clip=torch.nn.utils.clip_grad_value_),
    "clipped by the scaler": lambda scaler, params, optimizer: scaler.clip_grad_norm_(optimizer, 1e-3, fold=True),
}  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", RIGHT_EDITS)
def test_programs_that_edit_scaled_gradients_rightly_run(name, micro_batches):
    ours, theirs = (
        small_training(scaler("cpu"), RIGHT_EDITS[name], steps=20, micro_batches=micro_batches)
        for scaler in (GradScaler, GradScaler if name == "clipped by the scaler" else torch.amp.GradScaler)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("gradient", [1e-8, 2.0**-17, 1e-5])
def test_gradients_that_never_change_are_not_clipped_ones(weights, gradient):
    """A loss that is linear in its weights; scaled, the norm of the second one's gradients is 1."""
    one, scaler = weights(count=1), GradScaler("cpu")
    one.train(scaler, *[gradient] * 20)
    assert one.value == pytest.approx(-20 * gradient)


def test_the_search_for_scaled_clips_ends_and_waits_for_no_device(weights, forbid_host_syncs):
    one, scaler = weights(fused=True), GradScaler("cpu")
    one.train(scaler, 1.0)
    launches = []
    with forbid_host_syncs():
        for _ in range(20):
            one.backward(scaler)
            for param in one.params:
                param.grad.mul_(0.5)
            with OpsSeen() as seen:
                scaler.step(one.optimizer)
            launches.append(seen.names.count("log10"))
            scaler.update()
    assert launches == [2] * 16 + [0] * 4


def test_a_subclass_whose_steps_would_not_be_called_is_told():
    with pytest.warns(UserWarning, match=r"Mine overrides _maybe_opt_step, which .* never calls"):
        type("Mine", (GradScaler,), {"_maybe_opt_step": lambda *_: None})
    type("Other", (GradScaler,), {"step": lambda *_: None})


class ReadsFlag(torch.optim.SGD):
    """An optimizer with AMP support of its own, which relies on what torch.amp sets before each step."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        taken = self.grad_scale is None and not self.found_inf.item()
        for param in self.param_groups[0]["params"] if taken else ():
            param.sub_(param.grad)


@pytest.mark.parametrize("gradient", [3.0, math.inf])
@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_an_optimizer_with_amp_support_gets_the_flag_of_unscaled_gradients(weights, make, gradient):
    one, scaler = weights(optimizer=ReadsFlag), make("cpu", init_scale=8.0)
    one.backward(scaler, gradient)
    scaler.unscale_(one.optimizer)
    scaler.step(one.optimizer)
    assert one.value == (-3.0 if gradient == 3.0 else 0.0)
