"""Explain a skipped step: run it once more under ``diagnose``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_plugin.numerics.diagnosis import diagnose

if TYPE_CHECKING:
    from torch import nn

    from amp_plugin.scaling.step_log import Replay


def diagnose_skip(replay: Replay, model: nn.Module | None = None) -> str:
    """Run a skipped step once more under :func:`diagnose`, and return its report.

    For ``scaler.explain_skips``; Lightning's AmpMonitor and AmpAccelerator use it by themselves.

    Args:
        replay: the step.
        model: gives the module names; default: whatever module is called.

    Returns:
        The ops that made the first numbers which are not finite, and what to do. An error of the step itself
        is part of the text.

    Example:
        >>> import torch
        >>> from amp_plugin import GradScaler, diagnose_skip
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", enabled=False)
        >>> scaler.explain_skips(diagnose_skip, after=5)
        >>> def forward_and_backward(batch):
        ...     scaler.scale(model(batch).mean()).backward()
        >>> for batch in torch.ones(3, 4, 2):
        ...     optimizer.zero_grad()
        ...     scaler.recorded(forward_and_backward, batch)
        ...     value = scaler.step(optimizer)
        ...     scaler.update()
    """
    failed = ""
    with diagnose(model, keep_going=True) as diagnosis:
        try:
            replay.run()
        except Exception as error:  # noqa: BLE001 -- whatever the user's step raises
            failed = f"\n(then it raised {type(error).__name__}: {error})"
    return f"{diagnosis.report()}{failed}"
