"""The page shows spikes and overflows separately, and blames neither the loss scale nor a module for a spike."""

import pytest
import torch

pytest.importorskip("altair")

from amp_plugin import Spike, report
from tests.run_page.test_report import text_of
from tests.scaling.runs import Run, scaler_of


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_skipped_spike_is_shown_with_its_value_and_the_limit(scale, tmp_path):
    training = Run("sgd", scaler=scaler_of(scale, on_spike=Spike(window=8, warmup=4)))

    model = torch.nn.ParameterList(training.params)
    with report(training.scaler, model, tmp_path / "run.html") as page:
        for seed in range(10):
            training.backward(seed, 50.0 if seed == 7 else 1.0)
            training.scaler.step(training.optimizer)
            training.scaler.update()
    (skip,) = page.history.skips
    assert (skip.step, skip.is_spike, skip.blames_scale) == (8, True, False)
    assert not page.history.is_at_fault
    text = text_of(tmp_path / "run.html")
    assert "a spike" in text
    assert "above the limit" in text
    assert "loss scale is still too high" not in text
