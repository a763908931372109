"""Without a loss scale, the first skipped step gives one warning, with the command that finds the op."""

import warnings

import pytest
import torch
from torch import nn

import amp_plugin


def skips_told(scaler, model, optimizer, poisoned):
    """Train on batches, in which poisoned ones are nan. Return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in range(6):
            optimizer.zero_grad()
            x = torch.full((2, 4), float("nan") if batch in poisoned else 1.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scaler.core.log.read(wait=True)
    return [str(warning.message) for warning in caught if "was skipped" in str(warning.message)]


def trained(poisoned, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    scaler = amp_plugin.GradScaler("cpu", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.register(optimizer, names=model)
    return skips_told(scaler, model, optimizer, poisoned)


def test_it_names_step_parameters_and_command_once():
    (told,) = trained({2, 3, 5}, enabled=False)
    assert told.startswith("step 3 of SGD was skipped, and nothing is scaled: nan in 1 gradient: weight.")
    assert "Run `amp-plugin diagnose train.py`" in told


def test_a_run_without_skips_or_with_a_loss_scale_is_told_nothing():
    assert trained(set(), enabled=False) == []
    assert trained({2}, init_scale=16.0) == []


def test_under_accelerate():
    pytest.importorskip("accelerate")
    accelerator = amp_plugin.AmpAccelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            accelerator.backward(model(torch.full((2, 4), float("nan"))).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.last_step(optimizer).skipped
    told = [str(warning.message) for warning in caught if "was skipped" in str(warning.message)]
    assert len(told) == 1
    assert told[0].startswith("step 1 of SGD was skipped, and nothing is scaled: nan in")
