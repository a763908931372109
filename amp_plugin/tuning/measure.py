"""Measure the cost of a set of op rules and the resulting gradient error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from amp_plugin.casting.cast_log import log_casts
from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.casting.rules_in_force import rules_on_trial
from amp_plugin.hardware import in_widest_float
from amp_plugin.numerics.shadow import ShadowRun
from amp_plugin.numerics.values import Storages, storage_address
from amp_plugin.tuning.workload import Gradients, Workload

Goal = Literal["memory", "casts", "accuracy"]
"""What a search reduces. It is the bytes saved for the backward pass, the bytes of casts, or the error."""

SearchGoal = Goal | Literal["gap"]
"""A ``Goal``, or ``"gap"`` for the gap to recorded log-probabilities."""

_TIMINGS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The mean cost of a batch under a set of op rules, and the gradient error of each batch.

    Attributes:
        saved_bytes: The bytes that the forward pass saves for the backward pass, without the model's weights.
        cast_bytes: The bytes that casts read and write.
        errors: The relative gradient error of each batch. The relative error is the norm of the difference
            from the reference gradients, divided by the norm of the reference gradients. The gradients of all
            parameters are treated as one vector.
        mean_errors: For each batch, the mean of the relative gradient errors of the individual parameters.
            The relative error of an individual parameter counts as at most 1.
    """

    saved_bytes: float
    cast_bytes: float
    errors: tuple[float, ...]
    mean_errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean of ``errors`` over the batches with finite gradients.

        The mean is inf if no batch has finite gradients.
        """
        return _mean_of_finite(self.errors)

    @property
    def mean_error(self) -> float:
        """The mean of ``mean_errors`` over the batches with finite gradients."""
        return _mean_of_finite(self.mean_errors)

    @property
    def failed(self) -> int:
        """The number of batches with gradients that are not finite."""
        return sum(not math.isfinite(error) for error in self.errors)

    def first(self, batches: int) -> Measurement:
        """Return a copy that keeps the gradient errors of only the first ``batches`` batches.

        The byte counts do not change.
        """
        return replace(self, errors=self.errors[:batches], mean_errors=self.mean_errors[:batches])

    def cost(self, goal: SearchGoal) -> float:
        """Return the number that a search for this goal minimizes."""
        costs = {"memory": self.saved_bytes, "casts": self.cast_bytes}
        return costs.get(goal, self.error)

    def growth(self, goal: SearchGoal, default: Measurement) -> float:
        """Return the measured gradient error divided by the gradient error with the default op rules.

        The result is the larger of the ratios for ``error`` and ``mean_error``. If the goal is ``"accuracy"``
        or ``"gap"``, the result is instead the larger of the ratios for ``saved_bytes`` and ``cast_bytes``.
        """
        is_exactness = goal in {"accuracy", "gap"}
        names = ("cast_bytes", "saved_bytes") if is_exactness else ("error", "mean_error")
        pairs = [(getattr(self, name), getattr(default, name)) for name in names]
        return max(
            now / then if 0 < then < math.inf else (1.0 if now <= then else math.inf) for now, then in pairs
        )

    def stays_within(self, budget: float, goal: SearchGoal, default: Measurement) -> bool:
        """Return whether ``growth`` stays within the budget and no additional batches overflow."""
        return self.failed <= default.failed and self.growth(goal, default) <= 1 + budget


def _mean_of_finite(errors: Iterable[float]) -> float:
    finite = [error for error in errors if math.isfinite(error)]
    return mean(finite) if finite else math.inf


def rules_without_16_bits(device_type: str) -> OpRules:
    """Return rules under which autocast casts nothing to 16 bits.

    Tensors that are already in 16 bits keep their dtype.
    """
    default = OpRules.default(device_type)
    wide = {
        op: OpRule.PROMOTE if rule is OpRule.LOWER_PRECISION else rule for op, rule in default.rules.items()
    }
    return OpRules(device_type=device_type, rules=wide, keep=default.keep)


def gradient_errors(gradients: Gradients, reference: Gradients, *, batch: int) -> tuple[float, float]:
    """Compare the gradients of a batch with the gradients of a run in which no op uses 16 bits.

    If the gradients are multiplied by a constant power of two, such as a loss scale, this factor is divided
    out. ``batch`` is the number of the batch, for error messages.

    Returns:
        Two relative errors. The first error is computed over the gradients of all parameters, joined into one
        vector. The second error is the mean of the relative gradient errors of the individual parameters. If
        a gradient is not finite, both errors are inf.
    """
    if reference.keys() != gradients.keys():
        odd = sorted(reference.keys() ^ gradients.keys())
        msg = (
            f"in batch {batch}, other parameters have gradients than in the first run: "
            f"{', '.join(odd[:3])}; all runs must compute the same, so set the seeds of the code that "
            "chooses the parameters"
        )
        raise ValueError(msg)
    sums = {name: _sums(reference[name], grad) for name, grad in gradients.items()}
    scale = _power_of_two(sums.values())
    differences = {name: max(s[2] / scale**2 - 2 * s[1] / scale + s[0], 0.0) for name, s in sums.items()}
    total, norm = math.fsum(differences.values()), math.fsum(s[0] for s in sums.values())
    if not math.isfinite(total) or norm == 0:
        return math.inf, math.inf
    errors = [min(math.sqrt(differences[name] / s[0]), 1.0) for name, s in sums.items() if s[0] > 0]
    return math.sqrt(total / norm), sum(errors) / len(errors)


def _sums(reference: Tensor, gradient: Tensor) -> tuple[float, float, float]:
    """Return the sums of reference * reference, reference * gradient and gradient * gradient, in fp64."""
    ours, theirs = in_widest_float(reference), in_widest_float(gradient.detach().to(reference.device))
    products = torch.stack([(ours * ours).sum(), (ours * theirs).sum(), (theirs * theirs).sum()])
    first, second, third = products.tolist()
    return first, second, third


def _power_of_two(sums: Iterable[tuple[float, float, float]]) -> float:
    """Return the power of two closest to gradients / reference, or 1 if this ratio is undefined."""
    rows = [*sums]
    norm, product = math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)
    ratio = product / norm if norm > 0 else math.nan
    return 2.0 ** round(math.log2(ratio)) if math.isfinite(ratio) and ratio > 0 else 1.0


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Yield a list that collects the sizes in bytes of the tensors that autograd saves.

    Each storage is counted once. Parameters are not counted.
    """
    sizes: list[int] = []
    seen: Storages[bool] = Storages()

    def pack(tensor: Tensor) -> Tensor:
        # Tensors saved while activation checkpointing recomputes a forward pass in backward are not counted.
        in_backward = torch._C._current_graph_task_id() != -1
        base = tensor._base if tensor._base is not None else tensor
        if in_backward or isinstance(base, nn.Parameter) or not storage_address(tensor):
            return tensor
        if seen.get(tensor) is None:
            seen.set(tensor, True)
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


class Trials:
    """Measures sets of op rules on one workload."""

    def __init__(self, workload: Workload, device_type: str, *, reference: torch.dtype) -> None:
        self._workload = workload
        self._references: list[Gradients] = []  # the reference gradients of each batch, in float32
        shadow = ShadowRun(workload.model, dtype=reference) if reference is torch.float64 else None

        def keep(gradients: Gradients, _: float) -> None:
            if shadow is not None:
                gradients = {name: shadow.without_rounding(grad) for name, grad in gradients.items()}
            self._references.append({name: grad.detach().float().clone() for name, grad in gradients.items()})

        with rules_on_trial(rules_without_16_bits(device_type)), shadow or nullcontext():
            workload.run(keep, batches=workload.batches)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self._references)

    def measure(self, rules: OpRules, *, batches: int | None = None) -> Measurement:
        """Measure a set of op rules on the first ``batches`` batches, or on all batches by default."""
        errors: list[tuple[float, float]] = []

        def compare(gradients: Gradients, _: float) -> None:
            batch = len(errors)
            errors.append(gradient_errors(gradients, self._references[batch], batch=batch))

        count = batches or self.batches
        with rules_on_trial(rules), log_casts() as log, saved_bytes() as saved:
            self._workload.run(compare, batches=count)
        cast = log.totals().bytes / count
        whole, means = zip(*errors, strict=True)
        return Measurement(saved_bytes=sum(saved) / count, cast_bytes=cast, errors=whole, mean_errors=means)

    def told_jump(self, rules: OpRules) -> list[str]:
        """Return a sentence about the op at which the accumulated error jumps, and code that avoids the jump.

        Only the first batch is measured.
        """
        with rules_on_trial(rules), ShadowRun(self._workload.model) as shadow:
            self._workload.run(lambda *_: None, batches=1)
        return shadow.told_jump()

    def seconds(self, rules: OpRules) -> float:
        """Return the median time of a batch in seconds, without the overhead of other measurements."""
        seconds: list[float] = []
        with rules_on_trial(rules):
            self._workload.run(lambda _, taken: seconds.append(taken), batches=self.batches)
        return median(seconds)


def timed_in_turns(
    before: Callable[[], float], after: Callable[[], float] | None = None
) -> tuple[float, float]:
    """Time the original and the changed program alternately, and return the median time of each.

    Args:
        before: A function that times the original program on one batch.
        after: A function that times the changed program on one batch. None means that the program was not
            changed. A single measurement is then returned twice.
    """
    if after is None:
        return (once := before()), once
    pairs = [(before(), after()) for _ in range(_TIMINGS)]
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
