"""A clip by norm that is left to the kernel of a fused optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from amp_plugin.scaling.moves import moved


class FoldedClip(NamedTuple):
    """A clip by norm, taken into the number that a step's kernel divides by.

    Attributes:
        norm: Norm of the unscaled gradients, after ``earlier``; float32, 0-dim.
        max_norm: Largest norm.
        norm_type: The p of the norm.
        earlier: The clip before this one; None if there was none.
    """

    norm: Tensor
    max_norm: float
    norm_type: float
    earlier: FoldedClip | None = None

    def factor(self) -> Tensor:
        """Return what clipping multiplies the unscaled gradients by."""
        factor: Tensor = torch.ops.amp_plugin.clip_factor(self.norm, self.max_norm)
        return factor if self.earlier is None else factor * self.earlier.factor()

    def divisor(self, scale: Tensor) -> Tensor:
        """Return what unscaling and clipping divides the scaled gradients by; one launch."""
        scale = moved(scale, self.norm.device)
        divisor: Tensor = torch.ops.amp_plugin.clip_factor(self.norm, self.max_norm, scale)
        return divisor if self.earlier is None else divisor / self.earlier.factor()

    def measured_again(self, norm_of: Callable[[float], Tensor]) -> FoldedClip:
        """Return the same clip of what the gradients are now.

        Args:
            norm_of: Measures their norm of an order, without clips.
        """
        earlier = None if self.earlier is None else self.earlier.measured_again(norm_of)
        norm = norm_of(self.norm_type)
        return self._replace(norm=norm if earlier is None else norm * earlier.factor(), earlier=earlier)
