"""What is known of one optimizer's gradients between its steps where nothing is scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_plugin.scaling.collectives import Ranks
from amp_plugin.scaling.gradients import Measurement, batch_gradients, make_ledger, native_batch
from amp_plugin.scaling.shard_layout import ShardLayout


class UnscaledGradients:
    """The norm that somebody has taken already, and a way to read the gradients as they are.

    Attributes:
        norm: Of the gradients before clipping, 0-dim; None if nobody has taken it.
        changes_early: Whether the optimizer changes weights before the last call of its closure; None if no
            step has shown it yet.
    """

    def __init__(self) -> None:
        self.norm: Tensor | None = None
        self.changes_early: bool | None = None
        self._clip_norm: Tensor | None = None
        self._trusted = False
        self._ledger = make_ledger()
        self._ones: dict[torch.device, Tensor] = {}

    def note_norm(self, norm: Tensor) -> None:
        """Keep a norm (0-dim) for the next step's result."""
        self.norm = norm

    def note_clip(self, norm: Tensor, norm_type: float) -> None:
        """Keep the norm (0-dim) of a clip; of an order above 0 it is not finite if an element is not."""
        self.note_norm(norm)
        self._clip_norm, self._trusted = (norm if norm_type > 0 else None), False

    def assume_unchanged(self) -> None:
        """Trust the last clip: the step follows on it."""
        self._trusted = True

    def take_clip_norm(self) -> Tensor | None:
        """Return the norm of a clip that the step follows on, once; None if there was none."""
        norm = self._clip_norm if self._trusted else None
        self._clip_norm, self._trusted = None, False
        return norm

    def begin_anew(self) -> None:
        """Forget what was of the step that is over."""
        self.norm = None
        self.take_clip_norm()

    def measure(
        self, params: list[Tensor], layouts: Sequence[ShardLayout], ranks: Ranks
    ) -> tuple[list[Measurement], Tensor, Tensor] | None:
        """Read the gradients once; no host sync.

        Args:
            params: The optimizer's.
            layouts: The shard layouts among them.
            ranks: The processes that decide together.

        Returns:
            Measurements of this rank's, norm and found_inf over all ranks (float32, 0-dim); None if nobody
            has gradients.
        """
        plain = native_batch(self._ledger, params)
        batches = batch_gradients(params) if plain is None else [plain]
        measured = [
            Measurement(*batch.norm_check(self._one(batch.device), 2.0), batch.positions, batch.layout)
            for batch in batches
        ]
        if not (measured or layouts or ranks.groups):
            return None
        device = measured[0].norm.device if measured else params[0].device
        return measured, *ranks.combine(measured, 2.0, device, layouts)

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        return self._ones[device]
