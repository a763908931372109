"""Run a trainer's step on a recorded rollout, and compare its log-probabilities with the generator's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amp_plugin.casting.cast_log import log_casts
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_in_force import rules_on_trial
from amp_plugin.hardware import widest_float
from amp_plugin.numerics.emulated_rounding import EmulatedRounding
from amp_plugin.numerics.modules import buffers_kept
from amp_plugin.numerics.shadow import ShadowRun
from amp_plugin.patches import replaced
from amp_plugin.tuning.log_probs import GapNumbers, Sampling, fitted
from amp_plugin.tuning.measure import Measurement, rules_without_16_bits
from amp_plugin.tuning.model_call import logits_of
from amp_plugin.tuning.rollouts import RolloutBatch
from amp_plugin.tuning.search import Changes, with_changes
from amp_plugin.tuning.suspects import Suspect, emulated

# The recorded temperature and top-p are estimated from at most this many logits.
_MOST_LOGITS: Final = 1 << 26

Step = Callable[[Tensor], object]
"""A function that takes token ids of shape (sequences, length) and returns logits.

``length`` is that of the longest sequence. The logits have the shape (sequences, length, vocabulary).
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """A trainer's step on a rollout, optionally with changed op rules or emulated rounding steps.

    Each run starts from the same state.

    Attributes:
        step: The function that computes logits from token ids.
        model: The model whose buffers are restored after each run. None if the step changes no buffers.
        batches: The sequences of the rollout in batches.
        default: The op rules to which ``changes`` are applied.
        sampling: The temperature and top-p with which log-probabilities are computed from logits. If a
            setting is a tensor, it has one number for each sampled token of all batches.
        changes: Changes to the op rules.
        head: The Linear layer that runs in fp32, or None.
        emulated: Suspected rounding steps of the generator. The trainer rounds in the same places.
        dtype: The dtype to which results are rounded when a rounding step is emulated.
    """

    step: Step
    model: nn.Module | None
    batches: tuple[RolloutBatch, ...]
    default: OpRules
    sampling: Sampling
    changes: Changes = ()
    head: nn.Linear | None = None
    emulated: tuple[Suspect, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def rules(self) -> OpRules:
        """The op rules after the changes."""
        return with_changes(self.default, self.changes)

    def first(self, batches: int) -> Trainer:
        """Return a trainer that runs only the first batches."""
        return replace(self, batches=self.batches[:batches])

    def recorded(self) -> Tensor:
        """Return the recorded log-probabilities of all sampled tokens, in float64."""
        return torch.cat([batch.recorded for batch in self.batches])

    def log_probs(self) -> Tensor:
        """Return float64 log-probabilities under the changed op rules and the emulated rounding steps."""
        with self._changed():
            return self.scores()

    def exact(self) -> Tensor:
        """Return the unchanged trainer's log-probabilities, computed in float64 to avoid rounding errors."""
        device = self.default.device_type
        shadow = ShadowRun(dtype=widest_float(torch.device(device)))
        with rules_on_trial(rules_without_16_bits(device)), shadow:
            return self.scores(shadow.without_rounding)

    def scores(self, values: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Tensor:
        """Run the step as it is, and return the log-probabilities of the sampled tokens.

        Args:
            values: A function that is applied to each tensor of logits before log-probabilities are computed.
                By default, the logits are only detached.
        """
        found: list[Tensor] = []

        def score(batch: RolloutBatch, logits: Tensor, _: float) -> None:
            begin = sum(map(len, found))
            tokens = slice(begin, begin + len(batch.recorded))
            found.append(self.sampling.log_probs(values(logits), batch.targets, tokens))

        with torch.no_grad():
            self.run(score)
        return torch.cat(found)

    def gap(self) -> GapNumbers:
        """Return the gap between the changed trainer's log-probabilities and the recorded ones."""
        return GapNumbers.of(self.log_probs(), self.recorded())

    def distances(self) -> Tensor:
        """Return |trainer - recorded|, the absolute difference of the log-probabilities of each token.

        All differences are inf if the step fails with the changed op rules or the emulated rounding steps.
        """
        recorded = self.recorded()
        try:
            return (self.log_probs() - recorded).abs().nan_to_num(math.inf)
        except (RuntimeError, TypeError, NotImplementedError):
            return torch.full_like(recorded, math.inf)

    def measure(self, least: float) -> Measurement:
        """Return the gap and the number of cast bytes as a ``Measurement``, for a search over op rules.

        A gap below ``least`` counts as ``least``, so that the search adds no rule to reduce the gap further.
        """
        with log_casts() as log:
            gap = self.gap()
        size = max(gap.mean, least) if math.isfinite(gap.mean) else math.inf
        cast = log.totals().bytes / len(self.batches)
        return Measurement(saved_bytes=0.0, cast_bytes=cast, errors=(size,), mean_errors=(gap.p99,))

    def seconds(self) -> float:
        """Return the median time in seconds of a forward and backward pass over one batch."""
        taken: list[float] = []
        with torch.enable_grad(), self._changed():
            self.run(lambda *measured: taken.append(measured[-1]))
        return median(taken)

    def as_recorded(self) -> Trainer:
        """Return a copy of the trainer that uses the temperature and top-p of the generator.

        Both settings are estimated from the recorded log-probabilities.
        """
        kept: list[Tensor] = []

        def keep(_: RolloutBatch, logits: Tensor, __: float) -> None:
            room = max(_MOST_LOGITS // logits.shape[-1] - sum(map(len, kept)), 0)
            kept.append(logits[:room].detach().float().cpu())

        with torch.no_grad(), self._changed():
            self.run(keep)
        stated = Sampling(
            temperature=torch.cat([torch.as_tensor(b.stated.temperature) for b in self.batches]),
            top_p=torch.cat([torch.as_tensor(batch.stated.top_p) for batch in self.batches]),
        )
        targets = torch.cat([batch.targets for batch in self.batches])
        return replace(
            self, sampling=fitted(torch.cat(kept), targets, self.recorded(), stated=stated, own=self.sampling)
        )

    def places(self) -> EmulatedRounding:
        """In the first batch, find the ops whose results are wider than ``dtype``."""
        region = EmulatedRounding(self.dtype)
        with region:
            self.first(1).log_probs()
        return region

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """In a ``with`` block, use the changed op rules, run ``head`` in fp32, and emulate rounding."""
        with ExitStack() as stack:
            for block in (
                rules_on_trial(self.rules),
                _in_fp32(self.head),
                *emulated(self.emulated, self.dtype),
            ):
                stack.enter_context(block)
            yield

    def run(self, on_batch: Callable[[RolloutBatch, Tensor, float], None]) -> None:
        """Run the step on each batch, and call ``on_batch``.

        ``on_batch`` is called with the batch, the logits of its sampled tokens and the time in seconds.
        If gradients are enabled, a backward pass also runs.
        """
        kept = nullcontext() if self.model is None else buffers_kept(self.model)
        with torch.random.fork_rng(), kept:
            for batch in self.batches:
                started = time.perf_counter()
                logits = _checked(self.step(batch.tokens), batch.tokens)
                rows, columns = (numbers.to(logits.device) for numbers in batch.places)
                chosen = logits[rows, columns]
                if torch.is_grad_enabled():
                    _backward(chosen.float().log_softmax(-1).mean())
                if chosen.is_cuda:
                    torch.cuda.synchronize(chosen.device)
                on_batch(batch, chosen, time.perf_counter() - started)


def _checked(output: Any, tokens: Tensor) -> Tensor:
    """Return the logits in the output of a step, or raise an error if there are none."""
    logits = logits_of(output, tokens)
    if logits is None:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        wanted = f"({tokens.shape[0]}, {tokens.shape[1]}, vocabulary)"
        msg = (
            f"the step returned {given}; it has to return logits of shape {wanted}, or an object with .logits"
        )
        raise ValueError(msg)
    return logits


def _backward(loss: Tensor) -> None:
    """Compute the gradients of a loss without storing them."""
    leaves, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            nodes += [before for before, _ in node.next_functions]
    if leaves:
        torch.autograd.grad(loss, leaves, allow_unused=True)


def _in_fp32(head: nn.Linear | None) -> AbstractContextManager[object]:
    """Run one Linear layer in fp32 in a block. Other layers do not change."""
    if head is None:
        return nullcontext()

    def forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if layer is not head:
            return linear(input, layer.weight, layer.bias)
        with torch.autocast(input.device.type, enabled=False):
            bias = None if layer.bias is None else layer.bias.float()
            return linear(input.float(), layer.weight.float(), bias)

    return replaced(nn.Linear, "forward", forward)
