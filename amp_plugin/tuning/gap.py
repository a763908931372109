"""Measure the gap between a trainer's and a generator's log-probabilities, and find what closes it.

::

    sampling = the temperature and top-p with which the recorded log-probabilities were computed
               (log_probs.py finds them)

    exact = the trainer's log-probabilities without rounding (each op also runs in float64)

    F = mean |trainer - exact| when 16 bits are used only in the matrix products outside the head

    G = mean |recorded - exact|

    floor = sqrt(F^2 + min(F, G)^2), the expected gap if trainer and generator round independently

    repeat the next step as long as it reduces the gap:
        emulate the rounding step that brings the trainer's log-probabilities closest to the recorded ones

    run the trainer's head in fp32, and search for the smallest set of fp32 rules that reduces the gap

    accept a cause if removing it reduces the gap by at least a tenth, and by more than chance would explain

    if no cause is accepted and mean |trainer - recorded| <= 1.2 * floor, rounding alone explains the gap

The file emulated_rounding.py emulates rounding steps, and search.py searches for fp32 rules.

The gap can be smaller than ``floor`` if the trainer and the generator round at the same places. The search
for causes therefore continues until the gap is below a twentieth of ``floor``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from torch import Tensor, nn

from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.numerics.modules import Tracker
from amp_plugin.tuning.gap_tuning import Cause, GapTuning, told
from amp_plugin.tuning.log_probs import GapNumbers, Sampling
from amp_plugin.tuning.measure import Measurement, rules_without_16_bits, timed_in_turns
from amp_plugin.tuning.rollouts import Rollout, RolloutBatch
from amp_plugin.tuning.search import Change, Changes, Search
from amp_plugin.tuning.suspects import Suspect, suspects_of
from amp_plugin.tuning.trainer import Step, Trainer
from amp_plugin.tuning.workload import used_ops

_WORTH: Final = 0.9  # removing a cause must reduce the gap to less than this fraction of its former size
_NEGLIGIBLE: Final = 0.05  # the search stops when the gap is below this fraction of ``floor``
# Of the rounding steps that leave a gap within this factor of the smallest gap, the simplest is chosen.
_NEAR: Final = 1.05
_MOST_CAUSES: Final = 6
_SEARCHED: Final = 4  # the search tests each rounding step and each op rule on this many batches


@dataclass(frozen=True, slots=True)
class Gap:
    """A goal for ``tune`` that makes the log-probabilities of a trainer agree with those of a generator.

    Pass a Gap to ``tune`` as in ``tune(step, goal=Gap(rollout))``.

    Args:
        rollout: The tokens and log-probabilities that the generator recorded, or the path of a rollout file.
        temperature: The temperature by which the trainer divides its logits.
        top_p: The top-p with which the trainer computes log-probabilities. 1 means that it uses no top-p.
        dtype: The 16-bit dtype in which the generator computes.
        batch_size: The number of sequences per batch.

    Raises:
        ValueError: An option has a value that is not allowed, or the file is not a valid rollout file.

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
        """Return the gap between a trainer's step and the rollout, without a search for causes.

        The step runs once per batch.

        Args:
            step: A function that takes token ids and returns logits; see :func:`amp_plugin.tune`.

        Raises:
            ValueError: The step returned no logits.
        """
        trainer = _trainer_of(step, self, model=None, device_type="cpu")  # its rules are not used here
        return GapNumbers.of(trainer.scores(), trainer.recorded())


def _trainer_of(step: Step, goal: Gap, *, model: nn.Module | None, device_type: str) -> Trainer:
    """Return a Trainer that runs the user's step on the rollout."""
    return Trainer(
        step=step,
        model=model,
        batches=tuple(goal.batches),
        default=OpRules.default(device_type),
        sampling=Sampling(temperature=goal.temperature, top_p=goal.top_p),
        dtype=goal.dtype,
    )


def close_gap(
    step: Step, goal: Gap, *, model: nn.Module | None, device_type: str, progress: bool = False
) -> GapTuning:
    """Measure the gap between a step and a rollout, and search for changes that close it.

    See :func:`amp_plugin.tune`.
    """
    asked = _trainer_of(step, goal, model=model, device_type=device_type)
    with Console(file=sys.stderr, quiet=not progress).status("") as status:
        return _closed(asked, status.update)


def _closed(asked: Trainer, tell: Callable[[str], object]) -> GapTuning:
    """Measure the gap, search for its causes, and measure the gap again with the changes that close it.

    ``tell`` is called with a string that says what is being done.
    """
    tried: list[str] = []

    def on_try(what: str) -> None:
        tried.append(what)
        tell(f"{len(tried)} tried: {what}")

    tell("comparing with the record")
    gap, trainer = asked.gap(), asked.as_recorded()
    tell("running without rounding")
    region, ops = trainer.places(), _ops_not_in_16_bits(trainer)
    head = region.product if isinstance(region.product, nn.Linear) else None
    floor, errors = _floor(trainer, head, ops)
    is_followed = _follows_rules(trainer)
    causes, closed = [*_causes_of_record(asked, trainer.sampling)], trainer
    if float(trainer.distances().mean()) > _NEGLIGIBLE * floor:
        sides = [
            partial(_search_trainer, head=head, ops=ops if is_followed else []),
            partial(_search_generator, suspects=suspects_of(region.found, region.last, trainer.dtype)),
        ]
        sides = sides if errors[0] > errors[1] else sides[::-1]
        closed, found = _searched(trainer, sides, _NEGLIGIBLE * floor, on_try)
        causes += found
    after = replace(closed, emulated=())
    return GapTuning(
        gap=gap,
        floor=floor,
        trainer_error=errors[0],
        generator_error=errors[1],
        sampling=trainer.sampling,
        causes=tuple(sorted(causes, key=lambda cause: (cause.side != "record", cause.gap))),
        explained=closed.gap().mean,
        rules=after.rules,
        changes=after.changes,
        fp32_modules=() if after.head is None else (_path_of(after.head, region.tracker),),
        after=after.gap(),
        seconds=_price(trainer, after),
        tried=len(tried),
        is_followed=is_followed,
    )


def _searched(
    trainer: Trainer,
    sides: Sequence[Callable[[Trainer, float, Callable[[str], object]], tuple[Trainer, list[Cause]]]],
    least: float,
    on_try: Callable[[str], object],
) -> tuple[Trainer, list[Cause]]:
    """Search for causes in the trainer and in the generator, in the order of ``sides``.

    Returns:
        The trainer with all changes that close the gap, and the causes that were found.
    """
    closed, causes = trainer.first(_SEARCHED), []
    for search in sides:
        closed, found = search(closed, least, on_try)
        causes += found
    return replace(closed, batches=trainer.batches), causes


def _floor(trainer: Trainer, head: nn.Linear | None, ops: Sequence[str]) -> tuple[float, tuple[float, float]]:
    """Return the mean gap that rounding explains, and the rounding errors of trainer and generator."""
    exact = trainer.exact()
    least = _mean(replace(trainer, head=head, changes=_in_fp32(ops)).log_probs(), exact)
    errors = _mean(trainer.log_probs(), exact), _mean(trainer.recorded(), exact)
    return math.hypot(least, min(least, errors[1])), errors


def _follows_rules(trainer: Trainer) -> bool:
    """Return whether op rules change the trainer's results. Without autocast they do not."""
    without_16_bits = replace(trainer, default=rules_without_16_bits(trainer.default.device_type))
    return not torch.equal(without_16_bits.log_probs(), trainer.log_probs())


def _price(trainer: Trainer, after: Trainer) -> tuple[float, float]:
    """Return the time in seconds of a forward and backward pass, before and after the trainer was changed."""
    is_changed = bool(after.changes) or after.head is not None
    before, then = (part.first(_SEARCHED).seconds for part in (trainer, after))
    return timed_in_turns(before, then if is_changed else None)


def _causes_of_record(asked: Trainer, sampling: Sampling) -> Iterator[Cause]:
    """Yield a cause of the gap if the generator's temperature or top-p differs from the trainer's."""
    for name, words in (("temperature", "temperature"), ("top_p", "top-p")):
        theirs, ours = getattr(sampling, name), getattr(asked.sampling, name)
        if theirs is ours:
            continue
        alone = replace(asked, sampling=replace(asked.sampling, **{name: theirs}))
        text = (
            f"{words}: the recorded log-probabilities were computed with {words} {told(theirs)}, those of "
            f"the trainer with {told(ours)}; use the same {words} in the trainer, or change the generator"
        )
        setting = (f"{words} of the log-probabilities", f"{told(ours)}")
        yield Cause(name=text, side="record", gap=alone.gap().mean, setting=setting)


def _search_generator(
    trainer: Trainer, least: float, on_try: Callable[[str], object], *, suspects: Sequence[Suspect]
) -> tuple[Trainer, list[Cause]]:
    """Search the generator for causes of the gap, by emulating its suspected rounding steps in the trainer.

    Each round adds the rounding step that brings the trainer's log-probabilities closest to the recorded
    ones.

    Returns:
        The trainer that emulates the added rounding steps, and the causes that were found.
    """
    causes: list[Cause] = []
    left = trainer.distances()
    while float(left.mean()) > least and len(trainer.emulated) < _MOST_CAUSES:
        found: dict[int, Tensor] = {}
        for number, suspect in enumerate(suspects):
            on_try(suspect.name)
            found[number] = replace(trainer, emulated=(*trainer.emulated, suspect)).distances()
        gaps = {number: float(distances.mean()) for number, distances in found.items()}
        near = [number for number, size in gaps.items() if size <= _NEAR * min(gaps.values())]
        taken = min(near, key=lambda number: (suspects[number].size, gaps[number]), default=None)
        if taken is None or not _is_nearer(found[taken], left):
            break
        suspect, left = suspects[taken], found[taken]
        if suspect.is_cause:
            kernels = [other for other in trainer.emulated if not other.is_cause]
            gap = float(replace(trainer, emulated=(*kernels, suspect)).distances().mean())
            causes.append(Cause(name=suspect.name, side="generator", gap=gap, setting=suspect.setting))
        trainer = replace(trainer, emulated=(*trainer.emulated, suspect))
    return trainer, causes


def _search_trainer(
    trainer: Trainer,
    least: float,
    on_try: Callable[[str], object],
    *,
    head: nn.Linear | None,
    ops: Sequence[str],
) -> tuple[Trainer, list[Cause]]:
    """Search the trainer for causes of the gap.

    If running the head in fp32 reduces the gap, the head stays in fp32. Then a search adds fp32 op rules that
    reduce the gap further.

    Returns:
        The trainer with the changed head and op rules, and the causes that were found.
    """
    causes: list[Cause] = []
    left = trainer.distances()
    if head is not None and float(left.mean()) > least:
        on_try("the head in fp32")
        changed = replace(trainer, head=head)
        lower = changed.distances()
        if _is_nearer(lower, left):
            trainer, left, gap = changed, lower, float(lower.mean())
            causes.append(Cause(name="the head computes in 16 bits", side="trainer", gap=gap))
    if float(left.mean()) <= least or not ops:
        return trainer, causes

    def measure(changes: Changes, batches: int) -> Measurement:
        on_try(", ".join(map(str, changes)) or "the default rules")
        return replace(trainer, changes=changes).first(batches).measure(least)

    search = Search(measure, len(trainer.batches), trainer.default, "gap", math.inf)
    changes = search.best(ops)
    for change in changes:
        alone = search.measure((change,))
        gap = float(left.mean()) if alone is None else alone.error
        causes.append(Cause(name=f"{change.op} runs in 16 bits", side="trainer", gap=gap))
    return replace(trainer, changes=changes), causes


def _is_nearer(distances: Tensor, than: Tensor) -> bool:
    """Return True if the gap fell by at least a tenth, and by more than chance would explain.

    Chance is ruled out if the mean difference is at least four times its standard error.
    """
    gain = than - distances
    if not bool(gain.isfinite().all()) or float(distances.mean()) > _WORTH * float(than.mean()):
        return False
    return float(gain.mean()) >= 4 * float(gain.std()) / math.sqrt(gain.numel())


def _path_of(module: nn.Module, tracker: Tracker) -> str:
    """Return the path of a module in its model, in the form that the option ``fp32_modules`` takes."""
    return tracker.address(tracker.name_of(module))[1]


def _ops_not_in_16_bits(trainer: Trainer) -> list[str]:
    """Return the ops of the step, except those that run in 16 bits by default, such as matrix products."""
    rules = trainer.default.rules.items()
    products = {name.partition(".")[0] for name, rule in rules if rule is OpRule.LOWER_PRECISION}
    with torch.no_grad():
        used = used_ops(partial(trainer.first(1).run, lambda *_: None), trainer.default)
    return [op for op in used if op not in products]


def _in_fp32(ops: Sequence[str]) -> Changes:
    return tuple(Change(op=op, rule=OpRule.FP32) for op in ops)


def _mean(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean())
