"""What an accelerator reports about skipped steps.

tests/scaling/test_step_log.py covers the order of reports.
"""

import math

import pytest
import torch

from tests.adapters.accelerate_pair import ours, prepared


def test_an_optimizer_that_did_not_step_was_not_skipped():
    """Its last result belongs to an earlier iteration.

    An iteration ends when an optimizer steps a second time.
    """
    accelerator = ours(precision="bf16")
    models, optimizers = prepared(accelerator, count=2)
    for index, factor, expected in (
        (0, torch.inf, [True, False]), (1, 1.0, [True, False]), (1, 1.0, [False, False])
    ):  # fmt: skip
        accelerator.backward(models[index](factor))
        optimizers[index].step()
        optimizers[index].zero_grad()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == expected


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
def test_a_tracker_gets_a_loss_scale_only_if_losses_are_scaled(precision):
    accelerator = ours(precision=precision, init_scale=8.0)
    (model,), (optimizer,) = prepared(accelerator)
    told = []
    for factor in (2.0, torch.inf):
        accelerator.backward(model(factor))
        optimizer.step()
        optimizer.zero_grad()
        told.append(accelerator.metrics_since_log())
    assert accelerator.metrics_since_log() == {}
    fine, bad = told
    assert fine == {
        "grad_norm": 4.0,
        "skipped_steps": 0,
        **({"loss_scale": 8.0} if precision == "fp16" else {}),
    }
    assert (bad["skipped_steps"], bad.get("loss_scale")) == (1, 4.0 if precision == "fp16" else None)
    assert not math.isfinite(bad["grad_norm"])
    assert accelerator.amp_metrics()["loss_scale"] == (4.0 if precision == "fp16" else 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
def test_a_fused_optimizer_on_a_gpu(exact):
    accelerator = ours(precision="fp16", cpu=False, init_scale=8.0, exact_schedulers=exact)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for factor in (1e38, 1.0, 1.0):
        accelerator.backward(model(torch.ones(2, 4, device="cuda")).sum() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        rates.append(schedule.get_last_lr()[0])
    assert rates[-1] == 0.25  # the scheduler was held back in one of three steps
    if exact:
        assert rates[0] == 1.0
    assert accelerator.amp_metrics()["skipped_steps"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_training_on_a_gpu(precision, dtype):
    torch.manual_seed(0)
    accelerator = ours(precision=precision, cpu=False, steps=2)
    model, seen, losses = torch.nn.Sequential(torch.nn.Linear(8, 1)), set(), []
    model[0].register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    inputs = torch.randn(64, 8, device="cuda")
    for _ in range(60):
        for rows in inputs.chunk(2):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(rows), rows.sum(dim=1, keepdim=True))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    assert seen == {dtype}
    assert losses[-1] < 0.2 * losses[0]


def test_a_run_that_took_no_step_ends_with_a_warning(precision):
    def run(*factors):
        accelerator = ours(precision=precision)
        (model,), (optimizer,) = prepared(accelerator)
        for factor in factors:
            accelerator.backward(model(factor))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()

    with pytest.warns(UserWarning, match="no optimizer step was taken: 3 steps of GradientKeeper in a row"):
        run(torch.inf, torch.inf, torch.inf)
    run(torch.inf, 1.0)
    run()
