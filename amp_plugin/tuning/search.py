"""Search for op rules that lower the cost of a program, by adding one rule after another.

measure the default rules

on the first batch, try each rule of each used op by itself, with default rules for all other ops

on half of the batches, go through the rules that lowered the cost, from the largest saving to the smallest

    add the rule to the chosen rules if the new set stays within the budget and costs less than the old one

go through the rules up to three times, until no more rules are added

drop each chosen rule that does not lower the cost

measure the chosen rules over all batches together

while the measured rules exceed the budget or do not lower the cost, drop the rule that was added last
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

import torch

from amp_plugin.casting.rules import OpRule, OpRules, torch_release
from amp_plugin.tuning.measure import Measurement, SearchGoal

# A rule is added only if it saves more than this fraction of the cost of the default rules.
# The fraction is larger for the goal "gap", because measured gaps between log-probabilities vary by chance.
_LEAST_GAIN: Final[dict[SearchGoal, float]] = {
    "memory": 0.002,
    "casts": 0.002,
    "accuracy": 0.002,
    "gap": 0.1,
}
_ROUNDS: Final = 3
_WANTED: Final[dict[SearchGoal, tuple[OpRule, ...]]] = {
    "memory": (OpRule.LOWER_PRECISION, OpRule.UNCHANGED),
    "casts": (OpRule.LOWER_PRECISION, OpRule.UNCHANGED, OpRule.FP32),
    "accuracy": (OpRule.FP32,),
    "gap": (OpRule.FP32,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One op rule that differs from the default."""

    op: str  # the name of the op without its overload, such as "aten::layer_norm"
    rule: OpRule

    def __str__(self) -> str:
        return f"{self.op}: {self.rule.value}"


Changes = tuple[Change, ...]


def with_changes(rules: OpRules, changes: Iterable[Change]) -> OpRules:
    """Return a copy of ``rules`` in which some op rules are changed."""
    for change in changes:
        rules = rules.with_rule(change.op, change.rule)
    return rules


def as_yaml(device_type: str, changes: Changes, comments: Iterable[str]) -> str:
    """Return rules as the text of a YAML file that ``OpRules.from_yaml`` reads.

    The file begins with the given comments, and with a comment on the versions, the machine and the date.
    """
    version, today = vars(sys.modules["amp_plugin"])["__version__"], datetime.now(timezone.utc).date()
    made_by = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
    lines = [f"# {comment}" for comment in (*comments, made_by)]
    lines += [f"device_type: {device_type}", f"torch: '{torch_release()}'"]
    lines += ["rules:" if changes else "rules: {}", *(f"  {change}" for change in changes)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A set of changes and its measurement."""

    changes: Changes
    measurement: Measurement | None  # None if the program fails with these changes


class Search:
    """A greedy search over the rules of the ops that a program uses.

    Args:
        measure: A function that runs the first batches with changed op rules, and measures the effect.
            ``measure`` is called with the rule changes and the number of batches.
        batches: The largest number of batches to measure.
        default: The op rules from which the search starts.
        goal: What the search reduces.
        budget: The fraction by which the gradient error may grow, such as 0.05. For the goal "accuracy", it
            is the fraction by which the bytes saved for the backward pass and the bytes cast may grow.
    """

    def __init__(
        self,
        measure: Callable[[Changes, int], Measurement],
        batches: int,
        default: OpRules,
        goal: SearchGoal,
        budget: float,
    ) -> None:
        self._measure, self._batches, self._default = measure, batches, default
        self._goal, self._budget = goal, budget
        self._known: dict[tuple[Changes, int], Tried] = {}

    @property
    def tried(self) -> tuple[Tried, ...]:
        """All rule sets that were tried, in order."""
        return tuple(self._known.values())

    def measure(self, changes: Changes, *, batches: int | None = None) -> Measurement | None:
        """Return the measurement of a set of changes, or None if the program fails with these changes.

        Each set of changes is measured only once.
        """
        key = changes, batches or self._batches
        if key not in self._known:
            measured = None
            try:
                measured = self._measure(*key)
            except (RuntimeError, ValueError, NotImplementedError):
                if not changes:
                    raise
            self._known[key] = Tried(changes=changes, measurement=measured)
        return self._known[key].measurement

    def default(self, *, batches: int | None = None) -> Measurement:
        """Return the measurement of the default rules. If the program fails, its error is raised."""
        measured = self.measure((), batches=batches)
        assert measured is not None  # noqa: S101 - measure raises
        return measured

    def best(self, ops: Iterable[str]) -> Changes:
        """Return the rule changes that together lower the cost the most, in the order they were added.

        Return an empty tuple if no rule change lowers the cost.
        """
        half = (self._batches + 1) // 2  # only the final check uses the second half of the batches
        chosen = self._grown(self._ranked(change for op in ops for change in self._changes_of(op)), half)
        for change in reversed(chosen):  # drop each change that does not lower the cost
            fewer = tuple(other for other in chosen if other != change)
            if fewer and not self._is_better(chosen, fewer, half):
                chosen = fewer
        while chosen and not self._is_better(chosen, (), self._batches):
            chosen = chosen[:-1]
        return chosen

    def _changes_of(self, op: str) -> list[Change]:
        """Return one change for each rule that the op can have instead of its default rule."""
        now = {rule.value for name, rule in self._default.rules.items() if name.split(".")[0] == op}
        now = now or {"unchanged"}
        if now == {"banned"} or (now == {"lower_precision"} and self._goal not in {"accuracy", "gap"}):
            return []
        return [Change(op=op, rule=rule) for rule in _WANTED[self._goal] if now != {rule.value}]

    def _ranked(self, candidates: Iterable[Change]) -> list[Change]:
        """Return the changes that lower the cost of the first batch. Each change is tried alone.

        The change with the lowest cost comes first.
        """
        default = self.default(batches=1)
        costs: dict[Change, float] = {}
        for change in candidates:
            measured = self.measure((change,), batches=1)
            if measured is not None and self._saves(measured, default, default):
                costs[change] = measured.cost(self._goal)
        return sorted(costs, key=costs.__getitem__)

    def _grown(self, ranked: list[Change], batches: int) -> Changes:
        chosen: Changes = ()
        for _ in range(_ROUNDS):
            before = chosen
            for change in ranked:
                others = tuple(other for other in chosen if other.op != change.op)
                if change not in chosen and self._is_better((*others, change), chosen, batches):
                    chosen = (*others, change)
            if chosen == before:
                break
        return chosen

    def _is_better(self, changes: Changes, than: Changes, batches: int) -> bool:
        """Return whether ``changes`` stay within the budget and cost sufficiently less than other changes."""
        default, now = self.default(batches=batches), self.measure(changes, batches=batches)
        known = self.measure(than, batches=batches)
        if now is None or known is None or not now.stays_within(self._budget, self._goal, default):
            return False
        return self._saves(now, known, default)

    def _saves(self, measured: Measurement, than: Measurement, default: Measurement) -> bool:
        """Return whether a set of rules is cheaper than another by enough to justify one more rule."""
        goal = self._goal
        return measured.cost(goal) < than.cost(goal) - _LEAST_GAIN[goal] * default.cost(goal)

    def nearest(self) -> str:
        """Of the rule sets that lower the cost but exceed the error budget, describe the most accurate one.

        Return ``""`` if all tried rule sets that lower the cost are within the error budget. For the goals
        "accuracy" and "gap", always return ``""``.
        """
        goal = self._goal
        if goal in {"accuracy", "gap"}:  # here the budget limits the bytes
            return ""
        before, found = self.default(), []
        for attempt in self.tried:
            now = attempt.measurement
            if now is None or now.failed or not self._saves(now, before, before):
                continue
            default = before.first(len(now.errors))
            if not default.failed:
                growth = now.growth(goal, default) - 1
                saved = 1 - now.cost(goal) / before.cost(goal)
                rules = ", ".join(map(str, attempt.changes))
                found.append((growth, f"{rules}, which saves {saved:.1%} for {growth:.2%} more error"))
        return min([miss for miss in found if miss[0] > self._budget], default=(0.0, ""))[1]

    def cured(self, ops: Iterable[str]) -> Changes:
        """Return a minimal set of fp32 rules with which the gradients of all batches are finite."""
        changes = tuple(Change(op=op, rule=OpRule.FP32) for op in ops)
        if not self._is_cured(changes):
            msg = (
                "the gradients are not finite even with all ops in fp32, so the precision is not the reason; "
                "run amp-plugin diagnose to find the op"
            )
            raise RuntimeError(msg)
        for change in reversed(changes):
            fewer = tuple(other for other in changes if other != change)
            if self._is_cured(fewer):
                changes = fewer
        return changes

    def _is_cured(self, changes: Changes) -> bool:
        measured = self.measure(changes)
        return measured is not None and measured.failed == 0
