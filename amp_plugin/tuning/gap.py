"""The gap between the log-probabilities of a trainer and those that a generator recorded, and what closes it.

::

    sampling = the temperature and top-p with which the recorded log-probabilities were made    (log_probs.py)
    exact    = log-probabilities of the trainer without rounding                           (the shadow run)
    F        = mean |trainer - exact|, where only matrix products, without the head, are in 16 bits
    G        = mean |recorded - exact|
    floor    = sqrt(F^2 + min(F, G)^2)          two independent roundings of this size are so far apart
    repeat: of all roundings that the generator may have and the trainer has not,
            take the one that brings the trainer nearest to the record     (emulated_rounding.py)
    run the trainer's head in fp32, and search for the fewest fp32 rules   (search.py)
    a cause counts if the gap without it is below 0.9 of the gap with it, and by more than chance
    if no cause counts and mean |trainer - recorded| <= 1.2 floor:  rounding, nothing to gain

Two programs that round at the same places are nearer to each other than the floor. So causes are also
searched for below it. A gap below a twentieth of the floor is left alone.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import linear

from amp_plugin.casting.cast_log import log_casts
from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.casting.rules_in_force import rules_on_trial
from amp_plugin.hardware import widest_float
from amp_plugin.numerics.emulated_rounding import (
    ATTENTION,
    AttentionInSteps,
    EmulatedRounding,
    OpPlace,
    Rounded,
)
from amp_plugin.numerics.modules import Tracker, buffers_kept
from amp_plugin.numerics.shadow import ShadowRun
from amp_plugin.numerics.values import as_json
from amp_plugin.patches import replaced
from amp_plugin.tuning.log_probs import GapNumbers, SampledLogits, Sampling, Setting
from amp_plugin.tuning.measure import GradientError, Measurement, rules_without_16_bits, timed_in_turns
from amp_plugin.tuning.model_call import logits_of
from amp_plugin.tuning.rollouts import Rollout, RolloutBatch
from amp_plugin.tuning.search import Changes, Search, as_yaml
from amp_plugin.tuning.workload import used_ops

CLOSE: Final = 1.2
"""A gap up to this factor above the floor is rounding."""

_WORTH: Final = 0.9  # of the gap, that a cause must bring it below
_NEGLIGIBLE: Final = 0.05  # of the floor: a gap below is left alone
_NEAR: Final = 1.05  # a suspect with fewer places is taken if it is so near to the best one
_MOST_CAUSES: Final = 6
_SEARCHED: Final = 4  # batches that suspects and rules are tried on
_NOT_CLOSED: Final = (
    "the generator differs in another way: other weights, other token ids, or other mathematics"
)


Step = Callable[[Tensor], object]
"""Token ids of shape (sequences, longest) -> logits of shape (sequences, longest, vocabulary)."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The goal of making trainer and generator agree: ``tune(step, goal=Gap(rollout))``.

    Args:
        rollout: what the generator recorded, or the path of a rollout file.
        temperature: the temperature by which the trainer divides its logits.
        top_p: the top-p with which the trainer computes log-probabilities; 1 if it has none.
        dtype: the 16-bit dtype that the generator computes in.
        batch_size: sequences of a batch.

    Raises:
        ValueError: a value is not allowed, or the file does not fit.

    Example:
        >>> Gap(Rollout.of([[1, 15]], [[4, 27]], [[-0.71, -2.05]])).temperature
        1.0
    """

    rollout: Rollout | str | Path
    temperature: float = 1.0
    top_p: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    batch_size: int = 8

    def __post_init__(self) -> None:
        """Check the options and read the file."""
        if not isinstance(self.rollout, Rollout):
            object.__setattr__(self, "rollout", Rollout.from_jsonl(self.rollout))
        checks = {
            "temperature": (0 < self.temperature < math.inf, "a number above 0"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "dtype": (self.dtype in {torch.bfloat16, torch.float16}, "torch.bfloat16 or torch.float16"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
        }
        for name, (is_allowed, allowed) in checks.items():
            if not is_allowed:
                msg = f"Gap({name}={getattr(self, name)!r}) is not allowed; give {allowed}"
                raise ValueError(msg)

    @property
    def batches(self) -> list[RolloutBatch]:
        """The sequences in batches."""
        assert isinstance(self.rollout, Rollout)  # noqa: S101 - __post_init__ has read the file
        return self.rollout.batches(self.batch_size)

    def measure(self, step: Step) -> GapNumbers:
        """Return the gap of a trainer's step as it is, without a search; it runs the step once a batch.

        Args:
            step: takes token ids and returns logits, as :func:`amp_plugin.tune` says.

        Raises:
            ValueError: the step returned no logits.
        """
        scored = ScoredRollout(step, self.batches, None)
        trials = GapTrials(scored, "cpu", Sampling(temperature=self.temperature, top_p=self.top_p))
        return GapNumbers.of(trials.scores(), trials.recorded(len(scored.inputs)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One difference between trainer and generator.

    Attributes:
        name: what it is, in words.
        side: which one rounds there, ``"generator"`` or ``"trainer"``; ``"record"`` for temperature and
            top-p.
        gap: the mean gap if this cause alone is taken away.
        setting: the setting of the generator that takes it away, and its value; empty for the trainer.
    """

    name: str
    side: str
    gap: float
    setting: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class GapTuning:
    """The gap, its floor, its causes, and what closes it.

    Attributes:
        gap: the gap of the program as it is.
        floor: the mean gap that rounding alone explains.
        trainer_error: the mean distance of the trainer's log-probabilities from those without rounding.
        generator_error: the same of the recorded ones.
        sampling: how the recorded log-probabilities were made from logits.
        sampled_gap: the gap after the trainer computes them the same way.
        causes: the causes, the largest first.
        explained: the mean gap if the trainer rounds where the generator does, and follows the rules.
        rules: the op rules for the trainer.
        changes: those of them that differ from the default rules.
        fp32_modules: modules of the trainer that have to run in fp32: its head, or none.
        after: the gap of the trainer with ``rules`` and ``fp32_modules``.
        generator: settings of the generator that take the causes on its side away, with their values.
        seconds: the time of a forward and a backward pass of a batch as it is, and with the rules.
        tried: the number of roundings and of sets of rules that were tried.
        is_followed: False if op rules change nothing, because autocast is off.
    """

    gap: GapNumbers
    floor: float
    trainer_error: float
    generator_error: float
    sampling: Sampling
    sampled_gap: GapNumbers
    causes: tuple[Cause, ...] = ()
    explained: float
    rules: OpRules
    changes: Changes = ()
    fp32_modules: tuple[str, ...] = ()
    after: GapNumbers
    generator: Mapping[str, str] = field(default_factory=dict)
    seconds: tuple[float, float]
    tried: int = 0
    is_followed: bool = True

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains the gap: no cause was found, and it is near the floor or below."""
        return not self.causes and self.gap.mean <= CLOSE * self.floor

    @property
    def is_closed(self) -> bool:
        """Whether the causes explain the gap down to the floor."""
        return self.explained <= CLOSE * self.floor

    @property
    def headline(self) -> str:
        """What was found, in a line."""
        if self.is_rounding:
            return (
                f"rounding: nothing to gain; the gap is {self.gap.mean:.2e}, and the floor {self.floor:.2e}"
            )
        if not self.causes:
            return (
                f"not explained: the gap is {self.gap.mean:.2e}, the floor {self.floor:.2e}, and no rounding "
                f"that was tried brings it down; {_NOT_CLOSED}"
            )
        first, *more = self.causes
        others = f", and {len(more)} more" if more else ""
        rest = "" if self.is_closed else f"; the rest is not explained: {_NOT_CLOSED}"
        down = f"the gap comes down from {self.gap.mean:.2e} to {self.explained:.2e}"
        return f"{first.name}{others}: {down}, the floor is {self.floor:.2e}{rest}"

    def report(self) -> str:
        """Return everything as text."""
        errors = f"trainer {self.trainer_error:.2e}, generator {self.generator_error:.2e}"
        lines = [
            self.headline,
            f"gap        {self.gap}, {self.gap.tokens} tokens",
            f"floor      mean {self.floor:.2e}",
            f"rounding   {errors}, mean distance from a run without rounding",
        ]
        lines += [
            f"cause      {cause.side}: {cause.name}; without it the gap is {cause.gap:.2e}"
            for cause in self.causes
        ]
        lines += [f"generator  set {name} to {value}" for name, value in self.generator.items()]
        if self.fp32_modules:
            lines.append(f"trainer    fp32_modules={[*self.fp32_modules]}")
        lines += [f"trainer    rule {change}" for change in self.changes]
        if self.changes or self.fp32_modules:
            before, after = self.seconds
            price = f"{before * 1e3:.1f} ms -> {after * 1e3:.1f} ms ({(after / before - 1) * 100:+.1f} %)"
            lines += [f"after      {self.after}", f"price      {price} per batch, forward and backward"]
        if not self.is_followed:
            lines.append("note       no autocast block follows op rules, so none were searched")
        return "\n".join(lines)

    __str__ = report

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's values."""
        names = ("gap", "floor", "trainer_error", "generator_error", "sampled_gap", "causes", "explained")
        more = ("fp32_modules", "after", "generator", "seconds", "tried", "is_followed", "is_rounding")
        values = {name: getattr(self, name) for name in (*names, *more, "is_closed", "headline")}
        rules = {change.op: change.rule.value for change in self.changes}
        sampling = {name: _told(getattr(self.sampling, name)) for name in ("temperature", "top_p")}
        return as_json({**values, "rules": rules, "sampling": sampling})  # type: ignore[no-any-return]

    def to_yaml(self) -> str:
        """Return the rules as the text of a YAML file, with the measurements in its comments."""
        comments = [self.headline, f"gap {self.gap}", f"after {self.after}", f"floor {self.floor:.2e}"]
        return as_yaml(self.rules.device_type, self.changes, comments)

    def save(self, path: str | Path) -> None:
        """Write the rules to a file that ``OpRules.from_yaml`` reads."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


def _told(setting: Setting) -> float | str:
    """Return a setting as one number, or the words that the file states it."""
    if not isinstance(setting, Tensor):
        return setting
    values = sorted(set(setting.tolist()))
    return values[0] if len(values) == 1 else "as the file states for each sequence"


# -- running the trainer on the rollout -----------------------------------------------------------


OnBatch = Callable[[Any, float], None]


class ScoredRollout:
    """The trainer's step on the batches of a rollout. Each run starts from the same state."""

    def __init__(self, step: Step, batches: Sequence[RolloutBatch], model: nn.Module | None) -> None:
        self._step, self._inputs, self._model = step, batches, model

    @property
    def inputs(self) -> Sequence[RolloutBatch]:
        """The batches."""
        return self._inputs

    def run(self, on_batch: OnBatch, *, batches: int) -> None:
        """Call a function with the logits of the sampled tokens of each batch, and the seconds it took."""
        kept = nullcontext() if self._model is None else buffers_kept(self._model)
        with torch.random.fork_rng(), kept:
            for batch in self._inputs[:batches]:
                started = time.perf_counter()
                logits = _checked(self._step(batch.tokens), batch.tokens)
                chosen = logits[batch.rows.to(logits.device), batch.columns.to(logits.device)]
                if torch.is_grad_enabled():
                    _backward(chosen.float().log_softmax(-1).mean())
                if chosen.is_cuda:
                    torch.cuda.synchronize(chosen.device)
                on_batch(chosen, time.perf_counter() - started)


def _checked(output: Any, tokens: Tensor) -> Tensor:
    """Return the logits in the output of a step."""
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
    """Compute the gradients of a loss and drop them."""
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


class GapTrials:
    """Measures how far the trainer is from the record: as it is, under op rules, and with emulated roundings.

    Args:
        scored: the trainer's step on the rollout.
        device_type: of the trainer.
        sampling: how log-probabilities are made from logits; settings for each token are of all batches.
        floor: the gap below which less is no gain.
        around: a block to run the trainer in.
    """

    def __init__(
        self,
        scored: ScoredRollout,
        device_type: str,
        sampling: Sampling,
        floor: float = 0.0,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._scored, self._device_type, self.sampling = scored, device_type, sampling
        self._floor, self._around = floor, around

    @property
    def batches(self) -> int:
        """The number of batches that a search may use."""
        return min(len(self._scored.inputs), _SEARCHED)

    def recorded(self, batches: int) -> Tensor:
        """Return the recorded log-probabilities of the first batches, float64."""
        return torch.cat([batch.recorded for batch in self._scored.inputs[:batches]])

    def log_probs(self, rules: OpRules, *, batches: int | None = None) -> Tensor:
        """Return the trainer's log-probabilities of the first batches, by default all; float64."""
        with rules_on_trial(rules), self._around():
            return self.scores(batches=batches)

    def exact(self) -> Tensor:
        """Return the trainer's log-probabilities of all batches without any rounding; float64."""
        shadow = ShadowRun(dtype=widest_float(torch.device(self._device_type)))
        with rules_on_trial(rules_without_16_bits(self._device_type)), shadow:
            return self.scores(shadow.without_rounding)

    def scores(
        self, values: Callable[[Tensor], Tensor] = torch.Tensor.detach, *, batches: int | None = None
    ) -> Tensor:
        """Run the step and return the log-probabilities that ``values`` of the logits give; float64."""
        found: list[Tensor] = []
        begin = 0

        def score(logits: Tensor, _: float) -> None:
            nonlocal begin
            targets = self._scored.inputs[len(found)].targets
            tokens = slice(begin, begin + len(targets))
            found.append(self.sampling.log_probs(values(logits), targets, tokens))
            begin += len(targets)

        with torch.no_grad():
            self._scored.run(score, batches=batches or len(self._scored.inputs))
        return torch.cat(found)

    def gap(self, rules: OpRules, *, batches: int | None = None) -> GapNumbers:
        """Return the gap under a set of rules."""
        count = batches or len(self._scored.inputs)
        return GapNumbers.of(self.log_probs(rules, batches=count), self.recorded(count))

    def measure(self, rules: OpRules, *, batches: int | None = None) -> Measurement:
        """Return the gap under a set of rules as :class:`Search` takes it, with the bytes that were cast.

        A gap below the floor counts as the floor: nothing is paid for less than that.
        """
        count = batches or self.batches
        with log_casts() as log:
            gap = self.gap(rules, batches=count)
        size = max(gap.mean, self._floor) if math.isfinite(gap.mean) else math.inf
        error = GradientError(whole=size, mean=gap.p99)
        return Measurement(saved_bytes=0.0, cast_bytes=log.totals().bytes / count, errors=(error,))

    def seconds(self, rules: OpRules) -> float:
        """Return the median time of a forward and a backward pass of a batch, in seconds."""
        taken: list[float] = []
        with torch.enable_grad(), rules_on_trial(rules), self._around():
            self._scored.run(lambda _, seconds: taken.append(seconds), batches=self.batches)
        return median(taken)


# -- what the generator may round ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A rounding that the generator may have.

    Attributes:
        name: what it is, in words.
        setting: the setting of the generator that takes it away, and its value.
        roundings: place -> what is rounded there.
        attention: name of a rounding of the attention; empty if there is none.
    """

    name: str
    setting: tuple[str, str]
    roundings: Mapping[OpPlace, Rounded] = field(default_factory=dict)
    attention: str = ""

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self.roundings) + bool(self.attention)

    @property
    def is_cause(self) -> bool:
        """Whether a setting takes it away. Fused kernels round differently inside, and have none for it."""
        return bool(self.setting[0])


_STEPS: Final = Suspect(name="the attention runs in steps", setting=("", ""), attention="as fused")


_ROTARY: Final = re.compile(r"(rotary|rope)\w*\.\w+\.(cos|sin)$|\.\w*(rotary|rope)\w*\.\w+$", re.IGNORECASE)
_ATTENTION_SETTINGS: Final = {
    "softmax": ("softmax", "float32"),
    "scale": ("attention scale", "before the cast"),
    "cache": ("kv_cache_dtype", "the dtype of the model"),
}


def suspects_of(
    found: Mapping[OpPlace, tuple[int, ...]], head: OpPlace | None, dtype: torch.dtype
) -> list[Suspect]:
    """Return the roundings that a generator may have at places where the trainer has none.

    Args:
        found: places of the trainer's results that are wider than ``dtype``, in the order in which they first
            ran -> their shapes.
        head: the place among them that makes the logits; None if its result is not wider than ``dtype``.
        dtype: what the generator may round to.
    """
    short = str(dtype).removeprefix("torch.")
    suspects = [_STEPS]
    for place in found:
        is_head = place == head
        name = f"the head computes in {short} ({place})" if is_head else f"{place} rounds to {short}"
        setting = ("head", "float32") if is_head else (f"{place}", "float32")
        both = Rounded(operands=place.is_product)
        suspects.append(Suspect(name=name, setting=setting, roundings={place: both}))
        if place.is_product:
            told = name.replace("computes in", "casts its operands to").replace(
                "rounds", "rounds its operands"
            )
            only = Rounded(result=False, operands=True)
            suspects.append(Suspect(name=told, setting=setting, roundings={place: only}))
    suspects += _groups(found, short)
    suspects += [
        Suspect(name=f"{words} to {short}" if name == "softmax" else words, setting=setting, attention=name)
        for name, words in ATTENTION.items()
        for setting in [_ATTENTION_SETTINGS[name]]
    ]
    return suspects


def _groups(found: Mapping[OpPlace, tuple[int, ...]], short: str) -> Iterator[Suspect]:
    """Yield roundings of several places: functions, the rotary embedding, the residual stream, all places."""
    scopes: dict[str, list[OpPlace]] = {}
    for place in found:
        if not place.is_product:
            scopes.setdefault(place.scope, []).append(place)
    named = {f"{scope} computes in {short}": (scope, places) for scope, places in scopes.items()}
    rotary = [place for place in found if _ROTARY.search(f"{place.scope}.{place.op}")]
    named[f"the rotary embedding computes in {short}"] = ("rotary embedding", rotary)
    embedded = {shape for place, shape in found.items() if place.op == "embedding"}
    stream = [p for p, shape in found.items() if p.op == "embedding" or (p.op == "add" and shape in embedded)]
    named[f"the residual stream is kept in {short}"] = ("residual stream", stream)
    named[f"all results are rounded to {short}"] = ("dtype of activations", [*found])
    for name, (setting, places) in named.items():
        if len(places) > 1:
            roundings = {place: Rounded() for place in places}
            yield Suspect(name=name, setting=(setting, "float32"), roundings=roundings)


# -- the whole ------------------------------------------------------------------------------------


def close_gap(
    step: Step, goal: Gap, *, model: nn.Module | None, device_type: str, progress: bool = False
) -> GapTuning:
    """Measure the gap of a step to a rollout, and search for what closes it; see :func:`amp_plugin.tune`."""
    scored = ScoredRollout(step, goal.batches, model)
    with Console(file=sys.stderr, quiet=not progress).status("") as status:
        return _Closing(scored, goal, device_type, status.update).run()


class _Closing:
    """The search for what closes a gap, step by step."""

    def __init__(self, scored: ScoredRollout, goal: Gap, device: str, tell: Callable[[str], object]) -> None:
        self._scored, self._goal, self._device, self._tell = scored, goal, device, tell
        self._own = Sampling(temperature=goal.temperature, top_p=goal.top_p)
        self._default = OpRules.default(device)
        self._causes: list[Cause] = []
        self._emulated: list[Suspect] = []  # roundings of the generator that were found
        self._head: nn.Linear | None = None  # runs in fp32
        self._changes: Changes = ()
        self._tried = 0

    def run(self) -> GapTuning:
        """Measure, search and measure again."""
        default = self._default
        self._tell("comparing with the record")
        gap = self._trials(self._own).gap(default)
        sampling = self._fitted()
        trials = self._trials(sampling)
        recorded, mine = trials.recorded(len(self._scored.inputs)), trials.log_probs(default)
        self._causes += self._causes_of_record(sampling)
        self._tell("running without rounding")
        exact = trials.exact()
        region = EmulatedRounding(self._goal.dtype)
        with region:
            trials.log_probs(default, batches=1)
        head = region.product if isinstance(region.product, nn.Linear) else None
        with torch.no_grad():
            ops = [op for op in used_ops(self._scored, default) if not _is_product(op, default)]
        least = _mean(self._trials(sampling, head=head).log_probs(_with_fp32(default, ops)), exact)
        errors = _mean(mine, exact), _mean(recorded, exact)
        floor = math.hypot(least, min(least, errors[1]))
        is_followed = not torch.equal(trials.log_probs(rules_without_16_bits(self._device)), mine)
        left = sampled = GapNumbers.of(mine, recorded)
        if sampled.mean > _NEGLIGIBLE * floor:
            suspects = suspects_of(region.found, region.last, self._goal.dtype)
            sides = [
                partial(self._search_trainer, sampling, floor, head, ops if is_followed else []),
                partial(self._search_generator, sampling, floor, suspects),
            ]
            for search in sides if errors[0] > errors[1] else reversed(sides):
                search()
            left = self._trials(sampling, head=self._head, emulate=self._emulated).gap(self._rules)
        after = trials if self._head is None else self._trials(sampling, head=self._head)
        return GapTuning(
            gap=gap,
            floor=floor,
            trainer_error=errors[0],
            generator_error=errors[1],
            sampling=sampling,
            sampled_gap=sampled,
            causes=tuple(sorted(self._causes, key=lambda cause: (cause.side != "record", cause.gap))),
            explained=left.mean,
            rules=self._rules,
            changes=self._changes,
            fp32_modules=() if self._head is None else (_path_of(self._head, region.tracker),),
            after=after.gap(self._rules),
            generator=dict(cause.setting for cause in self._causes if cause.setting[0]),
            seconds=timed_in_turns(trials.seconds, after.seconds, default, self._rules),
            tried=self._tried,
            is_followed=is_followed,
        )

    @property
    def _rules(self) -> OpRules:
        rules = self._default
        for change in self._changes:
            rules = rules.with_rule(change.op, change.rule)
        return rules

    def _trials(
        self,
        sampling: Sampling,
        *,
        floor: float = 0.0,
        head: nn.Linear | None = None,
        emulate: Sequence[Suspect] = (),
    ) -> GapTrials:
        """Return trials with a head in fp32 and with emulated roundings."""

        @contextmanager
        def around() -> Iterator[None]:
            with ExitStack() as stack:
                for block in (_in_fp32(head), *_emulated(emulate, self._goal.dtype)):
                    stack.enter_context(block)
                yield

        return GapTrials(self._scored, self._device, sampling, floor, around)

    def _fitted(self) -> Sampling:
        """Return how the recorded log-probabilities were made from logits."""
        kept, inputs = SampledLogits(), self._scored.inputs
        targets = iter([batch.targets for batch in inputs])
        with torch.no_grad(), rules_on_trial(self._default):
            self._scored.run(lambda logits, _: kept.add(logits.cpu(), next(targets)), batches=len(inputs))
        stated = Sampling(
            temperature=torch.cat([batch.temperature for batch in inputs]),
            top_p=torch.cat([batch.top_p for batch in inputs]),
        )
        return kept.fit([batch.recorded for batch in inputs], stated, self._own)

    def _causes_of_record(self, sampling: Sampling) -> Iterator[Cause]:
        """Yield temperature and top-p of the record, if they are not those of the trainer."""
        for name, words in (("temperature", "temperature"), ("top_p", "top-p")):
            theirs, ours = getattr(sampling, name), getattr(self._own, name)
            if theirs is ours:
                continue
            alone = self._trials(replace(self._own, **{name: theirs})).gap(self._default)
            told = (
                f"{words}: the recorded log-probabilities are of {words} {_told(theirs)}, those of the "
                f"trainer of {_told(ours)}; let the trainer compute with it, or record without it"
            )
            setting = (f"{words} of the log-probabilities", f"{_told(ours)}")
            yield Cause(name=told, side="record", gap=alone.mean, setting=setting)

    def _search_generator(self, sampling: Sampling, floor: float, suspects: Sequence[Suspect]) -> None:
        """Take, one after another, the roundings that bring the trainer nearest to the record."""
        trials = partial(self._trials, sampling, head=self._head)
        left = self._distances(trials())
        while float(left.mean()) > _NEGLIGIBLE * floor and len(self._emulated) < _MOST_CAUSES:
            found: dict[int, Tensor] = {}
            for number, suspect in enumerate(suspects):
                self._tell(f"{self._tried} roundings tried: {suspect.name}")
                found[number] = self._distances(trials(emulate=[*self._emulated, suspect]))
            gaps = {number: float(distances.mean()) for number, distances in found.items()}
            near = [number for number, size in gaps.items() if size <= _NEAR * min(gaps.values())]
            taken = min(near, key=lambda number: (suspects[number].size, gaps[number]), default=None)
            if taken is None or not _is_nearer(found[taken], left):
                break
            suspect, left = suspects[taken], found[taken]
            kernels = [other for other in self._emulated if not other.is_cause]
            self._emulated.append(suspect)
            if suspect.is_cause:
                alone, setting = self._distances(trials(emulate=[*kernels, suspect])), suspect.setting
                cause = Cause(name=suspect.name, side="generator", gap=float(alone.mean()), setting=setting)
                self._causes.append(cause)

    def _search_trainer(
        self, sampling: Sampling, floor: float, head: nn.Linear | None, ops: Sequence[str]
    ) -> None:
        """Run the head in fp32 if that helps, and search for the fewest fp32 rules that help."""
        left, least = self._distances(self._trials(sampling, emulate=self._emulated)), _NEGLIGIBLE * floor
        if head is not None and float(left.mean()) > least:
            self._tell("running the head in fp32")
            lower = self._distances(self._trials(sampling, head=head, emulate=self._emulated))
            if _is_nearer(lower, left):
                self._head, left, gap = head, lower, float(lower.mean())
                self._causes.append(Cause(name="the head computes in 16 bits", side="trainer", gap=gap))
        if float(left.mean()) <= least or not ops:
            return
        trials = self._trials(sampling, floor=least, head=self._head, emulate=self._emulated)
        search = Search(
            trials, self._default, "gap", math.inf, lambda tried: self._tell(f"rules: {tried.changes}")
        )
        self._changes = search.best(ops)
        self._tried += len(search.tried)
        for change in self._changes:
            alone = search.measure((change,))
            gap = float(left.mean()) if alone is None else alone.error
            self._causes.append(Cause(name=f"{change.op} runs in 16 bits", side="trainer", gap=gap))

    def _distances(self, trials: GapTrials) -> Tensor:
        """Return |trainer - record| of each token; infinite if the program does not run so."""
        self._tried += 1
        recorded = trials.recorded(trials.batches)
        try:
            found = trials.log_probs(self._rules, batches=trials.batches)
        except (RuntimeError, TypeError, NotImplementedError):
            return torch.full_like(recorded, math.inf)
        return (found - recorded).abs().nan_to_num(math.inf)


def _is_nearer(distances: Tensor, than: Tensor) -> bool:
    """Whether a gap is lower by enough, and by more than chance: four standard errors of the difference."""
    gain = than - distances
    if not bool(gain.isfinite().all()) or float(distances.mean()) > _WORTH * float(than.mean()):
        return False
    return float(gain.mean()) >= 4 * float(gain.std()) / math.sqrt(gain.numel())


def _path_of(module: nn.Module, tracker: Tracker) -> str:
    """Return the path of a module in its model, as ``fp32_modules`` takes it."""
    return tracker.address(tracker.name_of(module))[1]


def _is_product(op: str, rules: OpRules) -> bool:
    """Whether an op runs in 16 bits by default, as matrix products do."""
    return any(
        rule is OpRule.LOWER_PRECISION for name, rule in rules.rules.items() if name.partition(".")[0] == op
    )


def _with_fp32(rules: OpRules, ops: Iterable[str]) -> OpRules:
    """Return rules under which these ops run in fp32."""
    for op in ops:
        rules = rules.with_rule(op, OpRule.FP32)
    return rules


def _mean(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean())


def _emulated(suspects: Sequence[Suspect], dtype: torch.dtype) -> Iterator[AbstractContextManager[object]]:
    """Yield what has to be open around a trainer that rounds where the suspects do."""
    roundings = {place: kind for suspect in suspects for place, kind in suspect.roundings.items()}
    attention = {suspect.attention for suspect in suspects if suspect.attention}
    if roundings:
        yield EmulatedRounding(dtype, roundings)
    if attention:
        yield AttentionInSteps(dtype, attention)


def _in_fp32(head: nn.Linear | None) -> AbstractContextManager[object]:
    """Run one Linear layer in fp32 for a block."""
    if head is None:
        return nullcontext()

    def forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if layer is not head:
            return linear(input, layer.weight, layer.bias)
        with torch.autocast(input.device.type, enabled=False):
            bias = None if layer.bias is None else layer.bias.float()
            return linear(input.float(), layer.weight.float(), bias)

    return replaced(nn.Linear, "forward", forward)
