"""What all optimizers of a scaler share."""

from __future__ import annotations

from dataclasses import dataclass

from amp_plugin.scaling.collectives import Ranks
from amp_plugin.scaling.loss_scales import LossScales


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all windows of a scaler use.

    Attributes:
        scales: The loss scales.
        ranks: The processes that decide together.
        fp16_gradients: Whether float16 gradients may be unscaled.
        one_pass: Whether steps may be taken in one pass.
    """

    scales: LossScales
    ranks: Ranks
    fp16_gradients: bool = False
    one_pass: bool = True
