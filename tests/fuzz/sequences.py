"""Random sequences of the public calls of GradScaler.

A sequence is a set-up and a list of events. Events name what to do; indices are taken modulo what
there is, and an event without a meaning where it stands is left out by the player. So any part of
a sequence is a sequence, which is what shrinking needs.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

from tests.fuzz.scale_model import DEFAULT
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


def generate(rng: random.Random, *, without: frozenset[str] = frozenset(), compiled: float = 0.0) -> Sequence:
    """Make a sequence: iterations as people write them, with anything in between."""
    setup = draw_setup(rng, without, compiled)
    make = _Maker(rng, setup, without)
    events: list[Event] = []
    if "named_only" in without:
        events.append(Event("backward", (DEFAULT, ((0, 1.0),), None)))
    for _ in range(rng.randint(1, 6)):
        events += make.iteration() if rng.random() < 0.75 else make.noise(rng.randint(1, 6))
    return Sequence(setup, events)


class _Maker:
    """Draws events."""

    def __init__(self, rng: random.Random, setup: Setup, without: frozenset[str]) -> None:
        self._rng = rng
        self._setup = setup
        self._without = without
        self._count = len(setup.kinds)
        self._weights = {name: weight for name, weight in _NOISE.items() if name not in without}

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
        return [event for event in events if event.name not in self._without]

    def noise(self, count: int) -> list[Event]:
        """Any events."""
        names = self._rng.choices(list(self._weights), list(self._weights.values()), k=count)
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
        return (self._o(), "zero_in_place" in self._without or self._rng.random() < 0.5)

    def _unscale(self) -> tuple[Any, ...]:
        return (self._o(),)

    _ensure_unscaled = _step = _raw_step = _register = _unscale

    def _limit(self) -> float:
        return self._rng.choice((0.1, 1.0, 2.0, 1e9))

    def _norm_type(self) -> float:
        return self._rng.choice((2.0, 2.0, 2.0, 1.0, math.inf))

    def _clip_norm(self) -> tuple[Any, ...]:
        fold = "fold" not in self._without and self._rng.random() < 0.5
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
        kinds = [kind for kind in EDITS if kind not in self._without]
        return (self._o(), self._rng.choice(kinds), self._rng.choice((0.01, 0.5, 2.0, 100.0)), self._params())

    def _inject(self) -> tuple[Any, ...]:
        kinds = [kind for kind in ("in place", "data", "replaced") if kind not in self._without]
        return (
            self._rng.randrange(PARAMS),
            self._rng.choice(("inf", "-inf", "nan")),
            self._rng.choice(kinds),
        )

    def _repair(self) -> tuple[Any, ...]:
        return (self._rng.randrange(PARAMS),)

    _drop_one = _swap = _repair

    def _edit_unscaled(self) -> tuple[Any, ...]:
        return (self._o(), self._rng.choice(("torch norm", "torch value", "decay")))

    def _regularise(self) -> tuple[Any, ...]:
        return (self._o(),)

    def _closure(self) -> tuple[Any, ...]:
        rng = self._rng
        edits = [] if "closure_edits" in self._without else ["clip value", "decay"]
        kinds = ["", "", "clip norm", "ensure", *edits]
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
