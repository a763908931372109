"""How many bytes a rank holds for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_plugin.sharding.shard_units import ShardUnit

_MOMENTS = 2  # Adam's
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes of one rank.

    Attributes:
        parameters: Elements of the whole model; under tensor parallelism of this rank's part of it.
        weights: Of its shards.
        gradients: Of the gradients of its shards, when the optimizer steps.
        moments: Of Adam's or AdamW's two moments in fp32.
        largest_gather: Of the largest unit as it is gathered, held while it runs; 0 without shards.
    """

    parameters: int
    weights: int
    gradients: int
    moments: int
    largest_gather: int

    def per_parameter(self) -> dict[str, float]:
        """Return kind -> bytes on this rank for each parameter of the model."""
        count = max(1, self.parameters)
        kinds = ("weights", "gradients", "moments", "largest_gather")
        return {kind: getattr(self, kind) / count for kind in kinds}

    def __str__(self) -> str:
        """Say it in one line."""
        counts = self.per_parameter()
        return (
            f"bytes a parameter on this rank: weights {counts['weights']:.3g}, "
            f"gradients {counts['gradients']:.3g}, AdamW's moments {counts['moments']:.3g}, "
            f"the largest gathered unit {counts['largest_gather']:.3g}"
        )


def rank_bytes(units: Sequence[ShardUnit]) -> RankBytes:
    """Count the bytes of a rank.

    Args:
        units: Those of a model.
    """
    shards = {unit: unit.trained // unit.shard_ranks for unit in units}
    gathers = [unit.gathered_bytes for unit in units if unit.engine in {"fsdp1", "fsdp2"}]
    return RankBytes(
        parameters=sum(unit.parameters for unit in units),
        weights=sum(unit.local_bytes for unit in units),
        gradients=sum(shard * unit.stored.itemsize for unit, shard in shards.items()),
        moments=_MOMENTS * _FP32_BYTES * sum(shards.values()),
        largest_gather=max(gathers, default=0),
    )
