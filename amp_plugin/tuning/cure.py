"""Find the fewest ops that have to run in fp32 so that a program's gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from amp_plugin.casting.dispatcher import rules_on_trial
from amp_plugin.casting.rules import OpRule, OpRules
from amp_plugin.numerics.diagnosis import diagnose
from amp_plugin.tuning.search import Change, Changes, Search
from amp_plugin.tuning.workload import NoObserver, Workload

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
