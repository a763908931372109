"""Search the rules that save most: one rule at a time, each kept only if the whole set measures better.

base = measure(default)
for op in used ops, rule in other rules of op:      # on the first batch
single = measure(default + rule)
while some rule is added (three rounds at most):    # on half of the batches
for rule in singles that gain, the largest gain first:
keep rule if measure(chosen + rule) is allowed and costs less
drop rules without which it costs no more
while measure(chosen) is not allowed on all batches: drop the rule added last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from amp_plugin.casting.dispatcher import rules_on_trial
from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.numerics.diagnose import diagnose
from amp_plugin.tuning.measure import Measurement, Trials
from amp_plugin.tuning.workload import NoObserver, Workload

Goal = Literal["memory", "casts", "accuracy"]

_LEAST_GAIN: Final = 0.002  # of what the default costs; less is not worth a rule
_ROUNDS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One rule that differs from the default.

    Attributes:
        op: name without overload, ``"aten::layer_norm"``.
        rule: its rule.
    """

    op: str
    rule: OpRule


Changes = tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A set of changes and what it measured.

    Attributes:
        changes: against the default rules.
        measurement: None where the program does not run with them.
        batches: on how many.
    """

    changes: Changes
    measurement: Measurement | None
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """What is to get smaller, and what may grow by how much.

    Attributes:
        goal: ``"memory"``, ``"casts"`` or ``"accuracy"``.
        budget: the share by which the gradient error may grow; for ``"accuracy"`` the bytes.
    """

    goal: Goal
    budget: float

    def cost(self, measured: Measurement) -> float:
        """Return what is to get smaller."""
        return {
            "memory": measured.saved_bytes,
            "casts": measured.cast_bytes,
            "accuracy": measured.error,
        }[self.goal]

    def allows(self, measured: Measurement, default: Measurement) -> bool:
        """Say whether what must not grow stays within the budget."""
        if measured.failed > default.failed:
            return False
        factor = 1 + self.budget
        if self.goal == "accuracy":
            return (
                measured.cast_bytes <= default.cast_bytes * factor
                and measured.saved_bytes <= default.saved_bytes * factor
            )
        return measured.error <= default.error * factor and (
            measured.mean_error <= default.mean_error * factor
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """A set of rules that saves something and is over the budget.

    Attributes:
        attempt: the set.
        saved: the share that it saves.
        growth: by which share the error grows: of the whole gradient, or of a parameter's mean, whichever
        more.
        over: by how much that is more than the budget.
    """

    attempt: Tried
    saved: float
    growth: float
    over: float

    def __str__(self) -> str:
        rules = ", ".join(f"{change.op}: {change.rule.value}" for change in self.attempt.changes)
        return (
            f"{rules}, which saves {self.saved:.1%}; its error grows by {self.growth:.1%}, "
            f"{self.over:.1%} over the "
            "budget"
        )


def missed(before: Measurement, goal: Goal, budget: float, attempt: Tried) -> Miss | None:
    """Return by how much a set missed the budget; None if it saves nothing or is not over it.

    Args:
        before: of the default rules, on all batches.
        goal: ``"memory"`` or ``"casts"``.
        budget: the share by which the error may grow.
        attempt: the set.
    """
    measured = attempt.measurement
    if measured is None or not attempt.changes or measured.failed:
        return None
    aim = Aim(goal=goal, budget=budget)
    default = replace(before, errors=before.errors[: attempt.batches])
    saved = 1 - aim.cost(measured) / aim.cost(before) if aim.cost(before) else 0.0
    if saved < _LEAST_GAIN or default.failed or not default.error or not default.mean_error:
        return None
    growth = max(measured.error / default.error, measured.mean_error / default.mean_error) - 1
    return (
        Miss(attempt=attempt, saved=saved, growth=growth, over=growth - budget) if growth > budget else None
    )


class Search:
    """A greedy search over the rules of the ops a program uses.

    Args:
        trials: measure.
        default: the rules to change.
        aim: what is wanted.
        on_tried: called with each set tried.
    """

    def __init__(self, trials: Trials, default: OpRules, aim: Aim, on_tried: Callable[[Tried], None]) -> None:
        self._trials = trials
        self._default = default
        self._aim = aim
        self._on_tried = on_tried

    def best(self, ops: Iterable[str]) -> Changes:
        """Return the changes that save most, in the order in which they were added; none if none does."""
        candidates = [change for op in ops for change in self._changes_of(op)]
        ranked = self._ranked(candidates)
        chosen = self._grown(ranked)
        return self.held(self._pruned(chosen))

    @property
    def batches(self) -> int:
        """The number of all batches."""
        return self._trials.batches

    def rules(self, changes: Iterable[Change]) -> OpRules:
        """Return the default rules with some changes."""
        rules = self._default
        for change in changes:
            rules = rules.with_rule(change.op, change.rule)
        return rules

    def measure(self, changes: Changes, *, batches: int | None = None) -> Measurement | None:
        """Measure some changes, and tell of them; None where the program does not run with them."""
        try:
            measurement = self._trials.measure(self.rules(changes), batches=batches)
        except (RuntimeError, ValueError, NotImplementedError):
            if not changes:
                raise
            measurement = None
        tried = batches or self._trials.batches
        self._on_tried(Tried(changes=changes, measurement=measurement, batches=tried))
        return measurement

    def held(self, chosen: Changes) -> Changes:
        """Return changes that hold on all batches as a whole: without those added last if need be."""
        while chosen and not self._is_better(chosen, (), batches=None):
            chosen = chosen[:-1]
        return chosen

    def _changes_of(self, op: str) -> list[Change]:
        """Return the other rules worth a try for an op."""
        now = {rule.value for name, rule in self._default.rules.items() if name.split(".")[0] == op}
        now = now or {"unchanged"}
        if now == {"banned"}:
            return []
        if self._aim.goal == "accuracy":
            wanted = [OpRule.FP32]
        elif now == {"lower_precision"}:
            wanted = []
        else:
            wanted = [OpRule.LOWER_PRECISION, OpRule.UNCHANGED]
            wanted += [OpRule.FP32] if self._aim.goal == "casts" else []
        return [Change(op=op, rule=rule) for rule in wanted if now != {rule.value}]

    def _ranked(self, candidates: list[Change]) -> list[Change]:
        """Return the changes that gain by themselves, the largest gain first, measured on the first batch."""
        default = self._known((), batches=1)
        gains: dict[Change, float] = {}
        for change in candidates:
            measured = self.measure((change,), batches=1)
            if measured is not None:
                gains[change] = self._aim.cost(default) - self._aim.cost(measured)
        least = _LEAST_GAIN * self._aim.cost(default)
        return sorted(
            (change for change in gains if gains[change] > least), key=lambda change: -gains[change]
        )

    def _grown(self, ranked: list[Change]) -> Changes:
        chosen: Changes = ()
        for _ in range(_ROUNDS):
            before = chosen
            for change in ranked:
                others = tuple(other for other in chosen if other.op != change.op)
                if change not in chosen and self._is_better((*others, change), chosen, batches=self._half):
                    chosen = (*others, change)
            if chosen == before:
                break
        return chosen

    def _pruned(self, chosen: Changes) -> Changes:
        """Drop the changes without which it costs no more."""
        for change in reversed(chosen):
            fewer = tuple(other for other in chosen if other != change)
            if fewer and not self._is_better(chosen, fewer, batches=self._half):
                chosen = fewer
        return chosen

    def _is_better(self, changes: Changes, than: Changes, *, batches: int | None) -> bool:
        """Whether changes are allowed and cost less than others by what is worth a rule."""
        default = self._known((), batches=batches)
        now = self.measure(changes, batches=batches)
        if now is None or not self._aim.allows(now, default):
            return False
        least = _LEAST_GAIN * self._aim.cost(default)
        return self._aim.cost(now) < self._aim.cost(self._known(than, batches=batches)) - least

    def _known(self, changes: Changes, *, batches: int | None) -> Measurement:
        return self._trials.measure(self.rules(changes), batches=batches)

    @property
    def _half(self) -> int:
        """The number of batches that the search sees; the others are left for the check at the end."""
        return (self._trials.batches + 1) // 2


_ATTEMPTS: Final = 10


class NotCured(RuntimeError):  # noqa: N818 - what became of the search
    """No set of fp32 ops makes the gradients finite."""


def cured(search: Search, workload: Workload, ops: Iterable[str]) -> Changes:
    """Return the fewest fp32 rules with which no more batches fail than without 16 bits.

    ``diagnose`` names the op that makes the first number which is not finite; it gets the rule fp32, and the
    next one is looked for. Rules that turn out not to be needed are dropped one by one.

    Args:
        search: measures sets of rules.
        workload: what fails.
        ops: all ops it uses, tried where ``diagnose`` names none.

    Raises:
        NotCured: the gradients are not finite with any set.
    """
    used = list(ops)
    chosen: Changes = ()
    for _ in range(_ATTEMPTS):
        if _is_cured(search, chosen):
            return _fewest(chosen, lambda changes: _is_cured(search, changes))
        named = [op for op in _named_ops(search.rules(chosen), workload) if _fp32(op) not in chosen]
        named = [op for op in named if op in used] or named
        if not named:
            break
        chosen = (*chosen, *map(_fp32, named))
    everything = tuple(map(_fp32, used))
    if not _is_cured(search, everything):
        msg = (
            "the gradients are not finite with all ops in fp32 either: the reason is not the precision; "
            "amp-plugin diagnose names the op"
        )
        raise NotCured(msg)
    return _fewest(everything, lambda changes: _is_cured(search, changes))


def _fp32(op: str) -> Change:
    return Change(op=op, rule=OpRule.FP32)


def _is_cured(search: Search, changes: Changes) -> bool:
    measured = search.measure(changes)
    return measured is not None and measured.failed == 0


def _fewest(changes: Changes, cures: Callable[[Changes], bool]) -> Changes:
    """Drop changes that are not needed, the first found last: it is the likeliest reason."""
    for change in reversed(changes):
        fewer = tuple(other for other in changes if other != change)
        if cures(fewer):
            changes = fewer
    return changes


def _named_ops(rules: OpRules, workload: Workload) -> list[str]:
    """Return the ops that ``diagnose`` names under some rules."""
    with rules_on_trial(rules), diagnose(workload.model, keep_going=True) as diagnosis:
        workload.run(NoObserver(), batches=workload.batches)
    return list(dict.fromkeys(op for finding in diagnosis.findings for op in finding.rule_names))
