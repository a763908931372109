"""Log-probabilities of sampled tokens, and their gap to recorded ones.

A generator may record the log-probability of a token before or after it divides the logits by the
temperature, and before or after it drops the tokens outside of top-p. The recorded numbers show which of
these it did::

    for way in (trainer's own, stated temperature, stated top-p, both, fitted temperature, fitted top-p):
        choose the way if its mean gap is below 0.8 times the gap of the way that is chosen so far

Rounding errors have no common direction that a temperature could follow. So a fit does not lower a gap that
comes from rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from amp_plugin.hardware import widest_float

_BETTER: Final = 0.8  # another setting must reduce the gap below this fraction
_TEMPERATURES: Final = (0.05, 5.0)  # the range that is searched
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
        kl: The k3 estimate of the KL divergence of the generator from the trainer: the mean of exp(d) - 1 -
            d, where d is trainer - generator. It is never negative.
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
"""One number for all tokens, or one for each, float64 of shape (tokens,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How log-probabilities are computed from logits.

    Attributes:
        temperature: The divisor of the logits.
        top_p: Only the most probable tokens count, up to this share of the probability. 1 counts all tokens.
    """

    temperature: Setting = 1.0
    top_p: Setting = 1.0

    def log_probs(self, logits: Tensor, targets: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Return the log-probabilities of tokens.

        Args:
            logits: Any floating-point dtype, shape (tokens, vocabulary).
            targets: int64 of shape (tokens,).
            tokens: Which of the settings per token belong to these tokens.

        Returns:
            Float64 of shape (tokens,) on the CPU.
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
    """Return, for each row, the total probability of the fewest tokens that reach ``top_p``."""
    ordered = log_probs.exp().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    limit = top_p[:, None] if isinstance(top_p, Tensor) else top_p
    return torch.where(before < limit, ordered, 0.0).sum(-1)


def fitted(logits: Tensor, targets: Tensor, recorded: Tensor, *, stated: Sampling, own: Sampling) -> Sampling:
    """Return how recorded log-probabilities were computed from logits.

    Args:
        logits: The logits of the first sampled tokens, shape (tokens, vocabulary). Not all
            sampled tokens need logits.
        targets: All sampled tokens, int64.
        recorded: The recorded log-probabilities of ``targets``, float64, with the shape of ``targets``.
        stated: The temperature and top-p that the file states for each token.
        own: The settings of the trainer.
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
    """Return the approximate minimum of a function: search a grid of equal ratios, then golden sections."""
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
