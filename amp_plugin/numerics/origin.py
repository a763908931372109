"""Where the numbers in a storage that are not finite come from."""

from __future__ import annotations

from typing import Literal

import torch

from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.forward_sites import Site

OriginKind = Literal["made", "weight", "input", "unwritten", "collective", "on purpose"]


class Origin:
    """The origin of numbers that are not finite, shared by every tensor they were passed on to.

    Attributes:
        kind: as in ``Finding``; ``"on purpose"`` needs no finding.
        finding: what to report.
        is_reported: it was reported, so what comes of it is no news.
        site: of the op that made it, the same object for the op's backward pass; None if that is not known.
    """

    def __init__(self, kind: OriginKind, finding: Finding | None = None, site: Site | None = None) -> None:
        self.kind = kind
        self.finding = finding
        self.site = site
        self.is_reported = False

    @property
    def is_accident(self) -> bool:
        """Whether an op made it, and nobody put it there."""
        return self.kind == "made"

    @property
    def is_scaled_gradient(self) -> bool:
        """Whether it is a gradient in fp16 that overflowed, as a loss scale that is too large makes it."""
        found = self.finding
        return (
            self.kind == "made"
            and found is not None
            and found.direction == "backward"
            and found.dtype is torch.float16
            and not found.values.nan
        )

    @property
    def waits_for_arithmetic(self) -> bool:
        """Whether it matters as soon as an op computes with it: moving it about is no fault yet."""
        return self.kind in {"weight", "input", "collective"} and not self.is_reported


ON_PURPOSE = Origin("on purpose")
