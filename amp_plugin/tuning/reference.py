"""The gradients that a run without 16 bits has, and how far others are from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.tuning.measurement import GradientError

Gradients = Mapping[str, Tensor]  # name of a parameter -> its gradient


def rules_without_16_bits(device_type: str) -> OpRules:
    """Return rules under which autocast casts nothing to 16 bits; tensors that are in 16 bits stay so."""
    default = OpRules.default(device_type)
    wide = {
        op: OpRule.PROMOTE if rule is OpRule.LOWER_PRECISION else rule for op, rule in default.rules.items()
    }
    return OpRules(device_type=device_type, rules=wide, keep=default.keep)


class ReferenceGradients:
    """The gradients of each batch in a run without 16 bits, kept in fp32: one copy a batch."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, gradients: Gradients) -> None:
        """Note the gradients of the next batch."""
        self._batches.append({name: grad.detach().float().clone() for name, grad in gradients.items()})

    def error(self, batch: int, gradients: Gradients) -> GradientError:
        """Compare the gradients of a batch with the reference's.

        A loss scale is divided out: the power of two by which the gradients are larger.

        Args:
            batch: its number, from 0.
            gradients: by the names of the reference's.

        Raises:
            ValueError: the batch gave other parameters a gradient.
        """
        reference = self._batches[batch]
        if reference.keys() != gradients.keys():
            odd = sorted(reference.keys() ^ gradients.keys())
            msg = (
                f"batch {batch} gives other parameters a gradient than before: {', '.join(odd[:3])}; "
                "tune compares steps that are alike: fix the seeds of what chooses them"
            )
            raise ValueError(msg)
        sums = {name: _sums(reference[name], grad) for name, grad in gradients.items()}
        scale = _power_of_two(sums.values())
        differences = {name: max(s[2] / scale**2 - 2 * s[1] / scale + s[0], 0.0) for name, s in sums.items()}
        total, norm = math.fsum(differences.values()), math.fsum(s[0] for s in sums.values())
        if not math.isfinite(total) or norm == 0:
            return GradientError(whole=math.inf, mean=math.inf)
        errors = [min(math.sqrt(differences[name] / s[0]), 1.0) for name, s in sums.items() if s[0] > 0]
        return GradientError(whole=math.sqrt(total / norm), mean=sum(errors) / len(errors))


def _sums(reference: Tensor, gradient: Tensor) -> tuple[float, float, float]:
    """Return the products reference², reference x gradient and gradient², summed in fp64."""
    ours, theirs = reference.double(), gradient.detach().to(reference.device).double()
    products = torch.stack([(ours * ours).sum(), (ours * theirs).sum(), (theirs * theirs).sum()])
    first, second, third = products.tolist()
    return first, second, third


def _power_of_two(sums: Iterable[tuple[float, float, float]]) -> float:
    """Return the power of two nearest to gradients over reference; 1 if there is none."""
    rows = [*sums]
    norm, product = math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)
    ratio = product / norm if norm > 0 else math.nan
    return 2.0 ** round(math.log2(ratio)) if math.isfinite(ratio) and ratio > 0 else 1.0
