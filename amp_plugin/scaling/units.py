"""The unit of a gradient: unscaled, scaled by one loss scale, or left by a fused step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.moves import moved


class Inverse(NamedTuple):
    """What kernels multiply gradients by, as they take it.

    Attributes:
        number: float32, 0-dim.
        is_scale: Whether 1/number is meant: the kernels invert a scale themselves, without a launch.
    """

    number: Tensor
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The gradients are what the loss's own backward would give."""

    def factor(self) -> Tensor | None:
        """Return what the gradients are multiplied by, float32, 0-dim; None means 1."""
        return None

    def inverse(self, device: torch.device) -> Inverse:
        """Return 1/factor on ``device``."""
        return Inverse(torch.ones((), dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class ScaledBy:
    """The gradients are multiplied by a loss scale, and follow its changes."""

    loss_scale: LossScale

    def factor(self) -> Tensor | None:
        """As :meth:`Unscaled.factor`."""
        return self.loss_scale.value  # None before the first loss: nothing is scaled yet

    def inverse(self, device: torch.device) -> Inverse:
        """As :meth:`Unscaled.inverse`."""
        scale = self.loss_scale.value
        if scale is None:
            return UNSCALED.inverse(device)
        here = scale.device == device
        return Inverse(scale, is_scale=True) if here else Inverse(self.loss_scale.inverse(device))


@dataclass(frozen=True, slots=True)
class LeftByFusedStep:
    """The gradients after a step whose kernel divides them: only the device knows whether it was taken.

    A taken step of torch's fused kernels has written them unscaled and clipped; one in one pass has written
    none. After a skipped step they are scaled in either case.

    Attributes:
        scale: The scale they had, float32, 0-dim.
        skipped: 1.0 if the step was skipped, else 0.0; float32, 0-dim.
        divisor: What unscales and clips them if the step was taken, float32, 0-dim; None for 1.
    """

    scale: Tensor
    skipped: Tensor
    divisor: Tensor | None = None

    def factor(self) -> Tensor | None:
        """As :meth:`Unscaled.factor`; worked out only where gradients live on."""
        carried = torch.ones_like(self.scale) if self.divisor is None else self.divisor
        return torch.where(self.skipped > 0, self.scale, carried)

    def inverse(self, device: torch.device) -> Inverse:
        """As :meth:`Unscaled.inverse`."""
        return Inverse(moved(self.factor(), device), is_scale=True)  # type: ignore[arg-type]


UNSCALED = Unscaled()
Unit = Unscaled | ScaledBy | LeftByFusedStep
