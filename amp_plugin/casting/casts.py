"""One cast that autocast made, and sums over casts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["weight", "input", "activation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """One cast of one tensor.

    Attributes:
        module: path of the module that ran the op, beginning with the class of the outermost one;
            empty outside modules.
        op: ``"aten::linear.default"``.
        argument: name of the op's argument.
        kind: ``"weight"`` (a parameter or buffer), ``"input"`` (an argument of the outermost module)
            or ``"activation"`` (all else).
        parameter: path of the parameter or buffer in the outermost module; empty if it is none.
        device: ``"cpu"``, ``"cuda"``, ...
        before, after: the dtypes.
        elements: number of elements.
        bytes: read and written by the cast; 0 if it was cached.
        cached: an earlier cast was used again.
    """

    module: str
    op: str
    argument: str
    kind: Kind
    parameter: str
    device: str
    before: torch.dtype
    after: torch.dtype
    elements: int
    bytes: int
    cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CastTotals:
    """Sums over casts.

    Attributes:
        casts: casts made.
        cached: uses of an earlier cast.
        elements: cast, without the cached ones.
        bytes: read and written.
    """

    casts: int = 0
    cached: int = 0
    elements: int = 0
    bytes: int = 0

    @staticmethod
    def of(casts: Iterable[Cast]) -> CastTotals:
        """Add up casts."""
        listed = list(casts)
        made = [cast for cast in listed if not cast.cached]
        return CastTotals(
            casts=len(made),
            cached=len(listed) - len(made),
            elements=sum(cast.elements for cast in made),
            bytes=sum(cast.bytes for cast in made),
        )
