"""What is known of one optimizer's gradients between its steps where nothing is scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_plugin.scaling.collectives import Ranks
from amp_plugin.scaling.folded_clip import FoldedClip
from amp_plugin.scaling.gradients import GradientLedger, Measurement, batches_of, make_ledger
from amp_plugin.scaling.moves import moved
from amp_plugin.scaling.shard_layout import ShardLayout

_CLIPPED = 0  # slot of the ledger: the gradients that a clip was left out of
_LEFT = 1  # and those that a step in one pass did not write

Found = tuple[list[Measurement], Tensor, Tensor]
"""Measurements of this rank's gradients, norm and found_inf over all ranks (float32, 0-dim)."""


class UnscaledGradients:
    """The norm, clip and measurement of one optimizer's gradients, from one step to the next.

    Attributes:
        norm: Of the gradients before clipping, 0-dim; None if it was not taken.
        clip: A clip left to the next step, which works it in as it reads gradients; None if there is none.
        changes_early: Whether the optimizer changes weights before the last call of its closure; None if no
            step has shown it yet.
    """

    def __init__(self) -> None:
        self.norm: Tensor | None = None
        self.clip: FoldedClip | None = None
        self.changes_early: bool | None = None
        self._clip_norm: Tensor | None = None
        self._trusted = False
        self._left: FoldedClip | None = None  # a clip that the last step worked in without writing gradients
        self._found: Found | None = None  # what a folded clip has measured
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

    # -- a clip that the step works in ---------------------------------------------------------

    def fold_clip(self, found: Found, max_norm: float, norm_type: float, params: list[Tensor]) -> Tensor:
        """Leave a clip to the step, and return the norm before it (0-dim).

        ``found`` is what :meth:`measure` has found for a norm of this order.
        """
        norm = found[1] if self.clip is None else found[1] * self.clip.factor()
        self.clip = FoldedClip(norm, max_norm, norm_type, self.clip)
        self._found, self._trusted, self._left = found, False, None
        self._ledger.remember(params, _CLIPPED)
        self.note_norm(norm)
        return norm

    def take_found(self) -> Found | None:
        """Return what a folded clip has measured if the step follows on it, once."""
        found = self._found if self._trusted else None
        self._found, self._trusted = None, False
        return found

    def forget_dropped_clip(self, params: list[Tensor]) -> None:
        """Forget a folded clip if its gradients were dropped and new ones have come."""
        if self.clip is not None and self._ledger.compare(params, _CLIPPED) == GradientLedger.NEW:
            self._drop_clip()

    def changed_since_clip(self, params: list[Tensor]) -> bool:
        """Whether a gradient was seen to change since a clip was folded."""
        return bool(self._ledger.compare(params, _CLIPPED) != GradientLedger.SAME)

    def clip_again(self, norm_of: Callable[[float], Tensor]) -> None:
        """Let a folded clip be of what the gradients are now; ``norm_of`` measures them in an order."""
        if self.clip is not None:
            self.clip = self.clip.measured_again(norm_of)

    def write_clip_(self, params: list[Tensor]) -> None:
        """Write into the gradients what was left to a step: one to come, or the last one."""
        if self._left is not None and self._ledger.compare(params, _LEFT) == GradientLedger.SAME:
            self._multiply_(params, self._left.factor())
        if self.clip is not None:
            self._multiply_(params, self.clip.factor())
        self._left = None
        self._drop_clip()

    def leave_unwritten(self, params: list[Tensor], *, skipped: bool) -> None:
        """Note that a step has worked a folded clip in without writing; a skipped one clips nothing."""
        clip = self.clip
        self._drop_clip()
        if clip is not None and not skipped:
            self._left = clip
            self._ledger.remember(params, _LEFT)

    def _drop_clip(self) -> None:
        self.clip, self._found = None, None

    def _multiply_(self, params: list[Tensor], factor: Tensor) -> None:
        for batch in batches_of(self._ledger, params):
            batch.multiply_(moved(factor, batch.device))

    # -- reading ------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Forget what was of the step that is over."""
        self.norm = None
        self.take_clip_norm()

    def measure(
        self, params: list[Tensor], layouts: Sequence[ShardLayout], ranks: Ranks, norm_type: float = 2.0
    ) -> Found | None:
        """Read the gradients once, for a norm of order ``norm_type``; no host sync.

        Returns:
            What was found; None if there are no gradients, on no rank.
        """
        measured = [
            batch.norm_check(self._one(batch.device), norm_type) for batch in batches_of(self._ledger, params)
        ]
        if not (measured or layouts or ranks.groups):
            return None
        device = measured[0].norm.device if measured else params[0].device
        return measured, *ranks.combine(measured, norm_type, device, layouts)

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        return self._ones[device]
