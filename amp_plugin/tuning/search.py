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

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.tuning.measure import Measurement, Trials

Goal = Literal["memory", "casts", "accuracy"]

_LEAST_GAIN: Final = 0.002  # of what the default costs; less is not worth a rule
_ROUNDS: Final = 3
_WANTED: Final[dict[Goal, tuple[OpRule, ...]]] = {
    "memory": (OpRule.LOWER_PRECISION, OpRule.UNCHANGED),
    "casts": (OpRule.LOWER_PRECISION, OpRule.UNCHANGED, OpRule.FP32),
    "accuracy": (OpRule.FP32,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One rule that differs from the default."""

    op: str  # without overload: "aten::layer_norm"
    rule: OpRule

    def __str__(self) -> str:
        return f"{self.op}: {self.rule.value}"


Changes = tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A set of changes and what it measured."""

    changes: Changes
    measurement: Measurement | None  # None where the program does not run with them
    batches: int  # on how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """What is to get smaller, and what may grow by how much."""

    goal: Goal
    budget: float  # share by which the gradient error may grow; for "accuracy" the bytes

    def cost(self, measured: Measurement) -> float:
        """Return what is to get smaller."""
        of_goal = {"memory": measured.saved_bytes, "casts": measured.cast_bytes, "accuracy": measured.error}
        return of_goal[self.goal]

    def saves(self, measured: Measurement, than: Measurement, default: Measurement) -> bool:
        """Return whether something costs less than another by what is worth a rule."""
        return self.cost(measured) < self.cost(than) - _LEAST_GAIN * self.cost(default)

    def growth(self, measured: Measurement, default: Measurement) -> float:
        """Return the factor by which what must not grow does: the worse of both errors, or of both bytes."""
        names = ("cast_bytes", "saved_bytes") if self.goal == "accuracy" else ("error", "mean_error")
        pairs = [(getattr(measured, name), getattr(default, name)) for name in names]
        return max(
            now / then if 0 < then < math.inf else (1.0 if now <= then else math.inf) for now, then in pairs
        )

    def allows(self, measured: Measurement, default: Measurement) -> bool:
        """Return whether what must not grow stays within the budget, and no more batches overflow."""
        return measured.failed <= default.failed and self.growth(measured, default) <= 1 + self.budget


class Search:
    """A greedy search over the rules of the ops a program uses."""

    def __init__(self, trials: Trials, default: OpRules, aim: Aim, on_tried: Callable[[Tried], None]) -> None:
        self._trials, self._default, self._aim, self._on_tried = trials, default, aim, on_tried
        self._known: dict[tuple[Changes, int], Tried] = {}

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Every set that was tried, in order."""
        return tuple(self._known.values())

    def rules(self, changes: Iterable[Change]) -> OpRules:
        """Return the default rules with some changes."""
        rules = self._default
        for change in changes:
            rules = rules.with_rule(change.op, change.rule)
        return rules

    def measure(self, changes: Changes, *, batches: int | None = None) -> Measurement | None:
        """Measure some changes, each set once; None where the program does not run with them."""
        key = changes, batches or self._trials.batches
        if key not in self._known:
            measured = None
            try:
                measured = self._trials.measure(self.rules(changes), batches=key[1])
            except (RuntimeError, ValueError, NotImplementedError):
                if not changes:
                    raise
            self._known[key] = Tried(changes=changes, measurement=measured, batches=key[1])
            self._on_tried(self._known[key])
        return self._known[key].measurement

    def default(self, *, batches: int | None = None) -> Measurement:
        """Measure the default rules; what does not run with them raises."""
        measured = self.measure((), batches=batches)
        assert measured is not None  # noqa: S101 - measure raises
        return measured

    def best(self, ops: Iterable[str]) -> Changes:
        """Return the changes that save most, in the order in which they were added; none if none does."""
        half = (self._trials.batches + 1) // 2  # the others are left for the check at the end
        chosen = self._grown(self._ranked(change for op in ops for change in self._changes_of(op)), half)
        for change in reversed(chosen):  # those without which it costs no more
            fewer = tuple(other for other in chosen if other != change)
            if fewer and not self._is_better(chosen, fewer, half):
                chosen = fewer
        while chosen and not self._is_better(chosen, (), self._trials.batches):
            chosen = chosen[:-1]
        return chosen

    def _changes_of(self, op: str) -> list[Change]:
        """Return the other rules worth a try for an op."""
        now = {rule.value for name, rule in self._default.rules.items() if name.split(".")[0] == op}
        now = now or {"unchanged"}
        if now == {"banned"} or (now == {"lower_precision"} and self._aim.goal != "accuracy"):
            return []
        return [Change(op=op, rule=rule) for rule in _WANTED[self._aim.goal] if now != {rule.value}]

    def _ranked(self, candidates: Iterable[Change]) -> list[Change]:
        """Return the changes that gain by themselves, the largest gain first, measured on the first batch."""
        default, cost = self.default(batches=1), self._aim.cost
        costs: dict[Change, float] = {}
        for change in candidates:
            measured = self.measure((change,), batches=1)
            if measured is not None and self._aim.saves(measured, default, default):
                costs[change] = cost(measured)
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
        """Return whether changes are allowed and cost less than others by what is worth a rule."""
        default, now = self.default(batches=batches), self.measure(changes, batches=batches)
        known = self.measure(than, batches=batches)
        if now is None or known is None or not self._aim.allows(now, default):
            return False
        return self._aim.saves(now, known, default)

    def nearest(self) -> str:
        """Return what saves something and exceeds the budget by least, in words; empty without any."""
        if self._aim.goal == "accuracy":  # the budget is one of bytes
            return ""
        before, found = self.default(), []
        for attempt in self.tried:
            now, default = attempt.measurement, replace(before, errors=before.errors[: attempt.batches])
            if now is not None and not now.failed + default.failed and self._aim.saves(now, before, before):
                growth = self._aim.growth(now, default) - 1
                saved = 1 - self._aim.cost(now) / self._aim.cost(before)
                rules = ", ".join(map(str, attempt.changes))
                found.append((growth, f"{rules}, which saves {saved:.1%} for {growth:.2%} more error"))
        return min([miss for miss in found if miss[0] > self._aim.budget], default=(0.0, ""))[1]

    def cured(self, ops: Iterable[str]) -> Changes:
        """Return fp32 rules with which no batch fails, and none of which may go."""
        changes = tuple(Change(op=op, rule=OpRule.FP32) for op in ops)
        if not self._is_cured(changes):
            msg = (
                "the gradients are not finite with all ops in fp32 either: the reason is not the precision; "
                "amp-plugin diagnose names the op"
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
