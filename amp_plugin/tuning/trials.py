"""Measure rule sets on a workload, each once."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from amp_plugin.casting.cast_log import log_casts
from amp_plugin.casting.dispatcher import rules_on_trial
from amp_plugin.casting.rules import OpRules
from amp_plugin.numerics.shadow_run import ShadowRun
from amp_plugin.tuning.measurement import GradientError, Measurement, middle
from amp_plugin.tuning.reference import Gradients, ReferenceGradients, rules_without_16_bits
from amp_plugin.tuning.saved_bytes import SavedBytes
from amp_plugin.tuning.workload import Workload


class Trials:
    """Measurements of rule sets on one workload, kept.

    Args:
        workload: what runs.
        device_type: of the rules.
        reference: ``torch.float64`` or ``torch.float32``: what the gradients are compared with.
    """

    def __init__(self, workload: Workload, device_type: str, *, reference: torch.dtype) -> None:
        self._workload = workload
        self._reference = _reference(workload, device_type, reference)
        self._known: dict[tuple[OpRules, int], Measurement] = {}
        self.batches = len(self._reference)

    def measure(self, rules: OpRules, *, batches: int | None = None) -> Measurement:
        """Return what a rule set costs on the first batches (all by default).

        Raises:
            RuntimeError: the program does not run with it.
        """
        count = batches or self.batches
        if (rules, count) not in self._known:
            self._known[rules, count] = self._measure(rules, count)
        return self._known[rules, count]

    def _measure(self, rules: OpRules, batches: int) -> Measurement:
        gauge = _Gauge(self._reference)
        with rules_on_trial(rules), log_casts() as log, SavedBytes() as saved:
            self._workload.run(gauge, batches=batches)
        return Measurement(
            saved_bytes=saved.total / batches,
            cast_bytes=log.totals().bytes / batches,
            seconds=middle(gauge.seconds),
            errors=tuple(gauge.errors),
        )

    def seconds(self, rules: OpRules) -> float:
        """Return the median time of a batch with nothing measured but time."""
        gauge = _Clock()
        with rules_on_trial(rules):
            self._workload.run(gauge, batches=self.batches)
        return middle(gauge.seconds)


class _Clock:
    """Times the batches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, gradients: Gradients) -> None:
        for device in {grad.device for grad in gradients.values() if grad.is_cuda}:
            torch.cuda.synchronize(device)
        self.seconds.append(time.perf_counter() - self._begun)


class _Gauge(_Clock):
    """Times the batches and compares their gradients."""

    def __init__(self, reference: ReferenceGradients) -> None:
        super().__init__()
        self.errors: list[GradientError] = []
        self._reference = reference

    def end(self, gradients: Gradients) -> None:
        super().end(gradients)
        self.errors.append(self._reference.error(len(self.errors), gradients))


class _Recording:
    """Notes the gradients that a shadow run has without rounding."""

    def __init__(self, reference: ReferenceGradients, shadow: ShadowRun | None) -> None:
        self._reference = reference
        self._shadow = shadow

    def begin(self) -> None:
        pass

    def end(self, gradients: Gradients) -> None:
        if self._shadow is not None:
            gradients = {name: self._shadow.without_rounding(grad) for name, grad in gradients.items()}
        self._reference.add(gradients)


def _reference(workload: Workload, device_type: str, dtype: torch.dtype) -> ReferenceGradients:
    """Run without 16 bits; for fp64 as the shadow of that run."""
    reference = ReferenceGradients()
    shadow = ShadowRun(workload.model, dtype=dtype) if dtype is torch.float64 else None
    with ExitStack() as opened:
        opened.enter_context(rules_on_trial(rules_without_16_bits(device_type)))
        if shadow is not None:
            opened.enter_context(shadow)
        workload.run(_Recording(reference, shadow), batches=workload.batches)
    return reference
