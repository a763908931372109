"""Make a failing sequence small: leave out events, then simplify the set-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.fuzz.sequences import Sequence
from tests.fuzz.setups import LOW_FLOOR, Setup


def shrink(sequence: Sequence, fails: Callable[[Sequence], bool], rounds: int = 20) -> Sequence:
    """Return a part of ``sequence`` that still fails and of which no event can be left out.

    Args:
        sequence: A sequence that fails.
        fails: Plays a sequence; True if it fails in the same way.
        rounds: Most passes over the sequence.
    """
    for _ in range(rounds):
        before = sequence
        sequence = _fewer_events(sequence, fails)
        for setup in _simpler(sequence.setup):
            if fails(sequence._replace(setup=setup)):
                sequence = sequence._replace(setup=setup)
        if sequence == before:
            break
    return sequence


def _fewer_events(sequence: Sequence, fails: Callable[[Sequence], bool]) -> Sequence:
    size = max(1, len(sequence.events) // 2)
    while True:
        start = 0
        while start < len(sequence.events):
            shorter = sequence._replace(events=sequence.events[:start] + sequence.events[start + size :])
            if fails(shorter):
                sequence = shorter
            else:
                start += size
        if size == 1:
            return sequence
        size //= 2


def _simpler(setup: Setup) -> Iterator[Setup]:
    for option, value in setup.options.items():
        if (option, value) == ("min_scale", LOW_FLOOR):
            continue
        yield dataclasses.replace(setup, options={k: v for k, v in setup.options.items() if k != option})
    if setup.compiled:
        yield dataclasses.replace(setup, compiled=False)
    if not all(setup.registered):
        yield dataclasses.replace(setup, registered=(True,) * len(setup.kinds))
    for o in range(len(setup.kinds)):
        if len(setup.kinds) > 1:
            yield Setup(
                kinds=_without(setup.kinds, o),
                members=_without(setup.members, o),
                registered=_without(setup.registered, o),
                compiled=setup.compiled,
                options=setup.options,
            )
        for kind in ("sgd", "sgd_fused"):
            if setup.kinds[o] not in {"sgd", "sgd_fused"}:
                kinds = (*setup.kinds[:o], kind, *setup.kinds[o + 1 :])
                yield dataclasses.replace(setup, kinds=kinds)
        for index in setup.members[o] if len(setup.members[o]) > 1 else ():
            fewer = tuple(i for i in setup.members[o] if i != index)
            members = (*setup.members[:o], fewer, *setup.members[o + 1 :])
            yield dataclasses.replace(setup, members=members)


def _without(values: tuple, place: int) -> tuple:
    return values[:place] + values[place + 1 :]
