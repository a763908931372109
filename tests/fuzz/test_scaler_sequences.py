"""Random sequences of GradScaler's public calls agree with float64 (a short run).

``make fuzz`` does the long run. A failure prints a small program that shows it.
"""

import pytest
import torch

from amp_plugin import GradScaler
from tests.fuzz.player import SCALER


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_any_sequence_of_calls(first):
    failure = next(SCALER.failures(1, range(first, first + 200)), None)
    if failure is not None:
        pytest.fail(f"\n{failure}", pytrace=False)


class DividesTwice(GradScaler):
    """A broken scaler: its ``unscale_`` divides by the scale twice."""

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(self.get_scale())


class ForgetsOneUnscaling(GradScaler):
    """A broken scaler: it steps with scaled gradients if nothing was unscaled before."""

    def step(self, optimizer, *args, **kwargs):
        if args or kwargs:
            return super().step(optimizer, *args, **kwargs)
        result = super().step(optimizer)
        if not self.last_step(optimizer).skipped:
            optimizer.step()
        return result


class RemembersNorms(GradScaler):
    """A broken scaler: it returns the norm of its first clip forever."""

    norms = None

    def clip_grad_norm_(self, target, *args, **kwargs):
        self.norms = self.norms or {}
        norm = super().clip_grad_norm_(target, *args, **kwargs)
        return self.norms.setdefault(id(target), norm) if isinstance(target, torch.optim.Optimizer) else norm


class UpdatesAtOnce(GradScaler):
    """A broken scaler: it applies an update although gradients still depend on the old scale. It converts
    them, so only the scale shows the fault.
    """

    def update(self, new_scale=None):
        super().update(new_scale)
        self.end_iteration()


class ForgetsOverflows(GradScaler):
    """A broken scaler: it never lowers the scale."""

    def update(self, new_scale=None):
        before = self.get_scale()
        super().update(new_scale)
        if new_scale is None and self.get_scale() < before:
            super().update(before)


@pytest.mark.parametrize(
    "broken", [DividesTwice, ForgetsOneUnscaling, RemembersNorms, UpdatesAtOnce, ForgetsOverflows]
)
def test_a_broken_scaler_is_found(broken):
    assert SCALER.finds(broken)
