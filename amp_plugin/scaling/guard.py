"""The guard: what is done where nothing is scaled, so that a gradient that is not finite changes nothing.

The gradients are read once, as they are when the step is taken. After a clip that no user code has
followed, its norm tells, and nothing is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.attribution import Attribution
from amp_plugin.scaling.collectives import Ranks
from amp_plugin.scaling.fused import is_fused, takes_scaler, without_momentum
from amp_plugin.scaling.gradients import Measurement
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.skipped_steps import RUN, SkipsByDevice
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.user_warnings import warn_user


class Check(NamedTuple):
    """What was found in the gradients of one step.

    Attributes:
        norm: Before clipping, float32, 0-dim; None if there are no gradients.
        found: 1.0 if a gradient is not finite, else 0.0; float32, 0-dim; None if there are no gradients.
        measured: What was read; empty if the norm of a clip was enough to know.
    """

    norm: Tensor | None = None
    found: Tensor | None = None
    measured: Sequence[Measurement] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Look at gradients before a step, and note what became of it.

    Attributes:
        ranks: The processes that decide together.
        skipped: How many steps were skipped, of all optimizers.
        sync_free: Whether optimizers without AMP support skip on the device too.
        checks: Whether gradients are looked at; False takes every step, as torch does.
        one_pass: Whether steps may be taken in one pass.
    """

    ranks: Ranks
    skipped: SkipsByDevice
    sync_free: bool = False
    checks: bool = True
    one_pass: bool = True

    def check(self, window: OptimizerWindow) -> Check:
        """Look whether an optimizer's gradients are finite; waits for no device."""
        gradients = window.unscaled
        clipped = gradients.take_clip_norm()
        if clipped is not None and not (window.spans_ranks or _was_skipped(window.result)):
            if clipped.device.type != "cpu":
                return Check(clipped, clipped.isfinite().logical_not().float())
            if clipped.isfinite().item():  # if not, read which they are: a norm may overflow by itself
                return Check(clipped, torch.zeros(()))
        found = gradients.measure(window.params, window.layouts, self.ranks)
        if found is None:
            return Check(gradients.norm)
        measured, norm, flag = found
        return Check(norm if gradients.norm is None else gradients.norm, flag, measured)

    def close(self, window: OptimizerWindow, check: Check, *, skipped: bool | None) -> None:
        """End the window with a step that was taken or skipped; None if only the device knows."""
        flagged = [(window.params, measured) for measured in check.measured]
        optimizer = weakref.ref(window.optimizer)
        result = StepResult(
            norm=check.norm,
            found_inf=torch.zeros(()) if check.found is None else check.found,
            scale_before=None,
            report=Attribution(window.params, flagged, window.names, optimizer).report,
            known=skipped,
            obstacle=window.obstacle,
        )
        window.unscaled.begin_anew()
        window.result = result
        if check.found is not None:
            window.skipped.add(check.found)
            self.skipped.add(check.found)
            if window.skipped.all_in_a_row():
                warn_user(_all_skipped_text(window.optimizer, result))

    def note_taken(self, window: OptimizerWindow) -> None:
        """End the window with a step that was taken without a look at its gradients."""
        norm = window.unscaled.norm
        window.unscaled.begin_anew()
        window.result = StepResult.unscaled(norm, obstacle=window.obstacle)


def skips_by_itself(optimizer: Optimizer, found: Tensor) -> bool:
    """Whether an optimizer's kernel skips by ``found``, where the host would have to wait for it."""
    if found.is_cpu or not is_fused(optimizer) or takes_scaler(optimizer):
        return False
    on_host = any(param.is_cpu for param in params_of(optimizer))  # its kernel reads the flag at once
    return not (on_host or any(param.grad is not None for param in without_momentum(optimizer)))


@contextmanager
def given_found_inf(optimizer: Any, found: Tensor) -> Iterator[None]:
    """Let a fused optimizer skip by a flag, or by the one that its user has set."""
    own: Tensor | None = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = found if own is None else torch.maximum(found, own.to(found.device))
    try:
        yield
    finally:
        if own is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = own


def _was_skipped(result: StepResult | None) -> bool:
    """Whether the host knows that the last step was skipped: then the next report names parameters."""
    return result is not None and bool(result.skipped_if_known())


def _all_skipped_text(optimizer: Optimizer, result: StepResult) -> str:
    report = result.overflow_report()
    return (
        f"{RUN} steps of {type(optimizer).__name__} in a row were skipped: its gradients are not finite "
        f"({report.summary()}), although nothing is scaled. {report.meaning()}"
    )
