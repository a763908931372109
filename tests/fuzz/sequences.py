"""Random sequences of the public calls of GradScaler.

A sequence is a set-up and a list of events. Events name what to do; indices are taken modulo what
there is, and an event without a meaning where it stands is left out by the player. So any part of
a sequence is a sequence, which is what shrinking needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tests.fuzz.setups import PARAMS, Setup, draw_setup


class Event(NamedTuple):
    """One thing to do: a method of the player, and its arguments."""

    name: str
    args: tuple[Any, ...] = ()


class Sequence(NamedTuple):
    """A set-up and what happens to it."""

    setup: Setup
    events: list[Event]


_NOISE = {
    "backward": 10,
    "zero_grad": 6,
    "unscale": 5,
    "ensure_unscaled": 3,
    "clip_norm": 6,
    "clip_norm_of_params": 4,
    "clip_value": 3,
    "edit": 6,
    "inject": 3,
    "repair": 1,
    "edit_unscaled": 3,
    "regularise": 1,
    "step": 12,
    "closure": 3,
    "raw_step": 1,
    "update": 8,
    "set_scale": 2,
    "end_iteration": 2,
    "scale_early": 1,
    "backward_early": 2,
    "add_param_group": 2,
    "register": 2,
    "drop_one": 1,
    "save": 1,
    "load": 1,
    "copy": 1,
    "restart": 1,
    "swap": 1,
    "set_rule": 1,
}

EDITS = ("in place", "replaced", "data", "numpy", "collective")


def generate(rng: random.Random) -> Sequence:
    """Make a sequence: iterations as people write them, with anything in between."""
    setup = draw_setup(rng)
    make = _Maker(rng, setup)
    events: list[Event] = []
    for _ in range(rng.randint(1, 6)):
        events += make.iteration() if rng.random() < 0.75 else make.noise(rng.randint(1, 6))
    return Sequence(setup, events)


def smaller(sequence: Sequence) -> Iterator[Sequence]:
    """Every sequence with fewer events, halves first, or with a simpler set-up."""
    events, size = sequence.events, len(sequence.events)
    while size > 0:
        for start in range(0, len(events), size):
            yield sequence._replace(events=events[:start] + events[start + size :])
        size //= 2
    for setup in _simpler(sequence.setup):
        yield sequence._replace(setup=setup)


def _simpler(setup: Setup) -> Iterator[Setup]:
    for option in setup.options:
        yield replace(setup, options={k: v for k, v in setup.options.items() if k != option})
    if not all(setup.registered):
        yield replace(setup, registered=(True,) * len(setup.kinds))
    for o, (kind, members) in enumerate(zip(setup.kinds, setup.members, strict=True)):

        def changed(values: tuple[Any, ...], *new: Any, o: int = o) -> tuple[Any, ...]:
            return (*values[:o], *new, *values[o + 1 :])

        if len(setup.kinds) > 1:
            rest = {name: changed(getattr(setup, name)) for name in ("kinds", "members", "registered")}
            yield replace(setup, **rest)
        for simple in ("sgd", "sgd_fused") if kind not in {"sgd", "sgd_fused"} else ():
            yield replace(setup, kinds=changed(setup.kinds, simple))
        for index in members if len(members) > 1 else ():
            yield replace(setup, members=changed(setup.members, tuple(i for i in members if i != index)))


class _Maker:
    """Draws events."""

    def __init__(self, rng: random.Random, setup: Setup) -> None:
        self._rng = rng
        self._setup = setup
        self._count = len(setup.kinds)

    def iteration(self) -> list[Event]:
        """One iteration of a training loop, with now and then something unusual in it."""
        rng = self._rng
        order = rng.sample(range(self._count), self._count)
        events = [self.draw("zero_grad", o) for o in order if rng.random() < 0.85]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            events.append(self.draw("backward"))
            events += self._perhaps(0.15)
        if rng.random() < 0.25:
            events.append(self.draw("inject"))
        update_each = rng.random() < 0.4
        for o in order:
            for name, chance in (
                ("edit", 0.15),
                ("unscale", 0.2),
                ("edit_unscaled", 0.2),
                ("clip_norm", 0.4),
            ):
                if rng.random() < chance:
                    events.append(self.draw(name, o))
            events += self._perhaps(0.2)
            if rng.random() < 0.9:
                events.append(Event("step", (o,)))
            if update_each:
                events.append(Event("update"))
        if not update_each and rng.random() < 0.9:
            events.append(Event("update"))
        return events

    def noise(self, count: int) -> list[Event]:
        """Any events."""
        names = self._rng.choices(list(_NOISE), list(_NOISE.values()), k=count)
        return [self.draw(name) for name in names]

    def _perhaps(self, chance: float) -> list[Event]:
        return self.noise(1) if self._rng.random() < chance else []

    def draw(self, name: str, o: int | None = None) -> Event:
        """One event of a name, its arguments drawn; for one optimizer if it is given."""
        arguments = getattr(self, f"_{name}", tuple)()
        return Event(name, arguments if o is None else (o, *arguments[1:]))

    def _o(self) -> int:
        return self._rng.randrange(self._count)

    def _params(self) -> tuple[int, ...]:
        return tuple(self._rng.sample(range(PARAMS), self._rng.randint(1, 3)))

    def _terms(self) -> tuple[tuple[int, float], ...]:
        everyone = self._rng.random() < 0.5
        params = range(PARAMS) if everyone else self._params()
        return tuple((i, float(self._rng.choice((1, 2, 3, 5, 0.5)))) for i in params)

    def _loss_name(self) -> str:
        return self._rng.choice(self._setup.names)

    def _backward(self) -> tuple[Any, ...]:
        overflow = self._rng.random() < 0.08
        return (self._loss_name(), self._terms(), self._rng.randrange(PARAMS) if overflow else None)

    def _zero_grad(self) -> tuple[Any, ...]:
        return (self._o(), self._rng.random() < 0.5)

    def _unscale(self) -> tuple[Any, ...]:
        return (self._o(),)

    _ensure_unscaled = _step = _raw_step = _register = _unscale

    def _limit(self) -> float:
        return self._rng.choice((0.1, 1.0, 2.0, 1e9))

    def _norm_type(self) -> float:
        return self._rng.choice((2.0, 2.0, 2.0, 1.0, math.inf))

    def _clip_norm(self) -> tuple[Any, ...]:
        fold = self._rng.random() < 0.5
        return (self._o(), self._limit(), self._norm_type(), fold)

    def _clip_norm_of_params(self) -> tuple[Any, ...]:
        return (self._params(), self._limit(), self._norm_type(), self._rng.random() < 0.3)

    def _clip_value(self) -> tuple[Any, ...]:
        return (
            self._o(),
            self._params() if self._rng.random() < 0.4 else None,
            self._rng.choice((0.1, 1.0, 100.0)),
        )

    def _edit(self) -> tuple[Any, ...]:
        return (self._o(), self._rng.choice(EDITS), self._rng.choice((0.01, 0.5, 2.0, 100.0)), self._params())

    def _inject(self) -> tuple[Any, ...]:
        value, kind = ("inf", "-inf", "nan"), ("in place", "data", "replaced")
        return (self._rng.randrange(PARAMS), self._rng.choice(value), self._rng.choice(kind))

    def _repair(self) -> tuple[Any, ...]:
        return (self._rng.randrange(PARAMS),)

    _drop_one = _swap = _repair

    def _edit_unscaled(self) -> tuple[Any, ...]:
        return (self._o(), self._rng.choice(("torch norm", "torch value", "decay")))

    def _regularise(self) -> tuple[Any, ...]:
        return (self._o(),)

    def _closure(self) -> tuple[Any, ...]:
        rng = self._rng
        kinds = ("", "", "clip norm", "ensure", "clip value", "decay")
        zero = rng.choice((True, True, False, None))
        overflow = rng.choice((None, None, None, 0, 1, 2))
        return (self._o(), self._terms(), zero, rng.choice(kinds), overflow, self._loss_name())

    def _set_scale(self) -> tuple[Any, ...]:
        return (2.0 ** self._rng.choice((-2, 0, 2, 6, 12)),)

    def _scale_early(self) -> tuple[Any, ...]:
        return (self._loss_name(), self._terms())

    def _add_param_group(self) -> tuple[Any, ...]:
        return (self._o(), self._rng.randrange(PARAMS))

    def _copy(self) -> tuple[Any, ...]:
        return (self._rng.random() < 0.5,)

    def _set_rule(self) -> tuple[Any, ...]:
        return self._rng.choice((("growth_factor", 4.0), ("backoff_factor", 0.25), ("growth_interval", 2)))
