"""What there is to log of optimizer steps: the loss scale, skips and gradient norms."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.step_result import StepResult


def scale_and_skips(scaler: GradScaler) -> dict[str, float | int]:
    """Return ``loss_scale`` and ``skipped_steps``: a host sync."""
    return {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps()}


class StepMetrics:
    """The metrics of steps taken since they were last asked for."""

    def __init__(self) -> None:
        self._logged: dict[int, StepResult | None] = {}

    def since_last_time(self, scaler: GradScaler, optimizers: Iterable[Optimizer]) -> dict[str, float | int]:
        """Return scale, skips and the norms of new results; nothing if there are none: a host sync.

        Args:
            scaler: whose results are read.
            optimizers: torch's, in a fixed order.
        """
        results = [scaler.result_of(optimizer) for optimizer in optimizers]
        new = {i: result for i, result in enumerate(results) if result is not self._logged.get(i)}
        self._logged = dict(enumerate(results))
        if not new:
            return {}
        norms = {
            "grad_norm" if len(results) == 1 else f"grad_norm/{i}": result.norm.item()
            for i, result in new.items()
            if result is not None and result.norm is not None
        }
        return {**scale_and_skips(scaler), **norms}

    def __reduce__(self) -> tuple[type[StepMetrics], tuple[()]]:
        """Copy and pickle without the results: they hold on to their optimizers."""
        return StepMetrics, ()
