"""Log-probabilities of sampled tokens, their gap to recorded ones, and how those were made from logits.

A generator may record the log-probability of a token before or after it divides the logits by the
temperature, and before or after it drops the tokens outside of top-p. Which one it did can be read from the
numbers::

    for way in (trainer's own, stated temperature, stated top-p, both, fitted temperature, fitted top-p):
        way is taken if its mean gap is below 0.8 of the gap of the way taken so far

Rounding has no direction that a temperature could follow, so a fit does not lower a gap of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from amp_plugin.hardware import widest_float

_BETTER: Final = 0.8  # of the gap, that a further setting must come below
_TEMPERATURES: Final = (0.05, 5.0)  # between these one is sought
_TOP_PS: Final = (0.05, 0.999)
_POINTS: Final = 48  # of the first grid


@dataclass(frozen=True, kw_only=True, slots=True)
class GapNumbers:
    """How far the log-probabilities of trainer and generator are apart, in nats.

    Attributes:
        tokens: the number of sampled tokens.
        mean: the mean of the absolute difference.
        p99: its 99th percentile.
        max: its largest value.
        kl: the k3 estimate of the KL divergence of the generator from the trainer. It is the mean of
            exp(d) - 1 - d, where d is trainer - generator, and never negative.
    """

    tokens: int
    mean: float
    p99: float
    max: float
    kl: float

    @staticmethod
    def of(trainer: Tensor, generator: Tensor) -> GapNumbers:
        """Return the numbers of two float64 tensors of log-probabilities, of one dimension."""
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
    """How log-probabilities are made from logits.

    Attributes:
        temperature: the logits are divided by it.
        top_p: only the most probable tokens count, up to this share; 1 counts all.
    """

    temperature: Setting = 1.0
    top_p: Setting = 1.0

    def log_probs(self, logits: Tensor, targets: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Return the log-probabilities of tokens.

        Args:
            logits: of any floating-point dtype and shape (tokens, vocabulary).
            targets: int64 of shape (tokens,).
            tokens: which of the settings for each token belong to these.

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
    """Return the probability of the fewest tokens that together reach ``top_p``, of each row."""
    ordered = log_probs.exp().sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    limit = top_p[:, None] if isinstance(top_p, Tensor) else top_p
    return torch.where(before < limit, ordered, 0.0).sum(-1)


def fitted(logits: Tensor, targets: Tensor, recorded: Tensor, *, stated: Sampling, own: Sampling) -> Sampling:
    """Return how recorded log-probabilities were made from logits.

    Args:
        logits: of the first sampled tokens, of shape (tokens, vocabulary). They may be fewer than all.
        targets: all sampled tokens, int64.
        recorded: their recorded log-probabilities, float64, shaped as ``targets``.
        stated: the temperature and top-p that the file states for each token.
        own: those that the trainer computes with.
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
    """Return about where a function is least: on a grid of equal ratios, then by golden sections."""
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
