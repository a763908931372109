"""Compute log-probabilities of sampled tokens, and compare them with recorded log-probabilities.

A generator may record the log-probability of a token either before or after it divides the logits by the
temperature. A generator may drop the tokens outside top-p either before or after it records the
log-probability. The search below finds out from the recorded log-probabilities what the generator did.

::

    begin with the trainer's own temperature and top-p

    try the temperature from the file, the top-p from the file, and both

    try the temperature that fits best, and then the top-p that fits best

    keep a trial if its mean gap is below 0.8 times the smallest gap so far

Rounding errors have random signs, so changing the temperature or top-p does not reduce a gap that comes from
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from amp_plugin.hardware import widest_float

# A new temperature or top-p must reduce the gap to less than this fraction of its former size.
_BETTER: Final = 0.8
_TEMPERATURES: Final = (0.05, 5.0)  # the range in which the search looks for the temperature
_TOP_PS: Final = (0.05, 0.999)
_POINTS: Final = 48  # the number of points in the first grid


@dataclass(frozen=True, kw_only=True, slots=True)
class GapNumbers:
    """The distance between a trainer's and a generator's log-probabilities, in nats.

    Attributes:
        tokens: The number of sampled tokens.
        mean: The mean absolute difference.
        p99: The 99th percentile of the absolute difference.
        max: The largest absolute difference.
        kl: The k3 estimate of the KL divergence of the generator from the trainer. The estimate is the mean
            of exp(d) - 1 - d, where d is the log-probability of the trainer minus that of the generator. This
            estimate is never negative.
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float

    @staticmethod
    def of(trainer: Tensor, generator: Tensor) -> GapNumbers:
        """Return the gap between two tensors of log-probabilities (float64, 1-dim, of the same length)."""
        difference = trainer - generator
        size = difference.abs()
        return GapNumbers(
            tokens=size.numel(),
            mean=float(size.mean()),
            p99=float(size.quantile(0.99)),
            max=float(size.max()),
            kl=float((difference.expm1() - difference).mean()),
        )

    def __str__(self) -> str:
        numbers = {"mean": self.mean, "p99": self.p99, "max": self.max, "k3-KL": self.kl}
        return ", ".join(f"{name} {number:.2e}" for name, number in numbers.items())


Setting = float | Tensor
"""One number for all tokens, or a tensor with one number per token, float64 of shape (tokens,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The temperature and top-p with which log-probabilities are computed from logits.

    Attributes:
        temperature: The number by which logits are divided.
        top_p: The total probability that the most probable tokens must reach. All other tokens are dropped.
            With 1, no token is dropped.
    """

    temperature: Setting = 1.0
    top_p: Setting = 1.0

    def log_probs(self, logits: Tensor, targets: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Return the log-probabilities of tokens.

        Args:
            logits: The logits, of shape (tokens, vocabulary) and any floating-point dtype.
            targets: The token ids, int64 of shape (tokens,).
            tokens: The slice of ``temperature`` and ``top_p`` that belongs to ``logits``. The slice has no
                effect on a temperature or top-p that is a single number.

        Returns:
            The log-probabilities, float64 of shape (tokens,) on the CPU.
        """
        wide = logits.detach().to(widest_float(logits.device))
        targets = targets.to(logits.device)

        def setting(value: Setting) -> Setting:
            return value[tokens].to(wide) if isinstance(value, Tensor) else value

        temperature, top_p = setting(self.temperature), setting(self.top_p)
        wide = wide / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
        every = wide.log_softmax(-1)
        chosen = every.gather(-1, targets[:, None])[:, 0]
        if isinstance(top_p, Tensor) or top_p < 1:
            chosen = chosen - _nucleus(every, top_p).log()
        return chosen.double().cpu()


def _nucleus(log_probs: Tensor, top_p: Setting) -> Tensor:
    """For each row, return the total probability of the top tokens that together reach ``top_p``."""
    ordered = log_probs.exp().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    limit = top_p[:, None] if isinstance(top_p, Tensor) else top_p
    return torch.where(before < limit, ordered, 0.0).sum(-1)


def fitted(logits: Tensor, targets: Tensor, recorded: Tensor, *, stated: Sampling, own: Sampling) -> Sampling:
    """Return the temperature and top-p with which recorded log-probabilities were computed from logits.

    Args:
        logits: The logits of the first sampled tokens, of shape (tokens, vocabulary). There may be fewer
            logits than sampled tokens.
        targets: The ids of all sampled tokens, int64.
        recorded: The recorded log-probabilities of ``targets``, float64, with the shape of ``targets``.
        stated: The temperature and top-p that the rollout file states, for each token.
        own: The temperature and top-p of the trainer.
    """
    known = slice(len(logits))

    def gap(way: Sampling) -> float:
        size = float((way.log_probs(logits, targets[known], known) - recorded[known]).abs().mean())
        return size if math.isfinite(size) else math.inf

    best, least = own, gap(own)
    for way in (replace(own, temperature=stated.temperature), replace(own, top_p=stated.top_p), stated):
        if (size := gap(way)) < _BETTER * least:
            best, least = way, size
    for name, limits in (("temperature", _TEMPERATURES), ("top_p", _TOP_PS)):

        def changed(value: float, name: str = name, way: Sampling = best) -> Sampling:
            return replace(way, **{name: value})

        found = changed(_least(lambda value, changed=changed: gap(changed(value)), *limits))  # type: ignore[misc]
        if (size := gap(found)) < _BETTER * least:
            best, least = found, size
    return best


def _least(size: Callable[[float], float], low: float, high: float) -> float:
    """Find the approximate minimum of a function by a grid search followed by a golden-section search."""
    ratio = math.pow(high / low, 1 / _POINTS)
    grid: list[float] = [low * ratio**number for number in range(_POINTS + 1)]
    middle = min(grid, key=size)
    begin, end = max(middle / ratio, low), min(middle * ratio, high)
    golden = (math.sqrt(5) - 1) / 2
    while end - begin > 1e-4 * end:
        left, right = end - golden * (end - begin), begin + golden * (end - begin)
        if size(left) <= size(right):
            end = right
        else:
            begin = left
    return (begin + end) / 2
