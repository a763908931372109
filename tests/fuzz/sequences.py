"""Random sequences of GradScaler's public calls.

A sequence is a set-up and a list of events. An event names what to do. Its indices are taken modulo the
number of objects that exist. The player skips an event that has no meaning at its position. So any part of a
sequence is a valid sequence, which shrinking requires.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.fuzz.scale_model import DEFAULT

PARAMS = 5

_KINDS = {
    "sgd": 4,
    "sgd_momentum": 2,
    "sgd_fused": 4,
    "sgd_fused_momentum": 3,
    "adamw_fused": 4,
    "adamw_foreach": 3,
    "third_party": 3,
    "two_calls": 1,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The objects that a sequence starts with."""

    kinds: tuple[str, ...]  # kinds of the optimizers: names in :mod:`tests.fuzz.prelude`
    # the indices of each optimizer's parameters; a parameter may belong to several optimizers
    members: tuple[tuple[int, ...], ...]
    registered: tuple[bool, ...]  # whether each optimizer is registered at the start
    options: dict[str, Any] = field(default_factory=dict)  # arguments of GradScaler

    @property
    def names(self) -> tuple[str, ...]:
        return (DEFAULT, *self.options.get("losses", ()))

    def weights(self) -> list[list[float]]:
        return [[0.5 + 0.25 * i, 1.25 - 0.5 * i] for i in range(PARAMS)]


def draw_setup(rng: random.Random) -> Setup:
    count = rng.choice((1, 1, 2, 2, 2, 3))
    chosen = tuple(rng.choices(list(_KINDS), list(_KINDS.values()), k=count))
    pool = list(range(PARAMS - 1))
    rng.shuffle(pool)
    members = [[pool.pop()] for _ in range(count)]
    for indices in members:
        if pool and rng.random() < 0.4:
            indices.append(pool.pop())
    if count > 1 and rng.random() < 0.35:
        _share(rng, members)
    known = rng.choice((1.0, 1.0, 1.0, 0.5, 0.0))
    return Setup(
        kinds=chosen,
        members=tuple(map(tuple, members)),
        registered=tuple(rng.random() < known for _ in chosen),
        options=_options(rng),
    )


def _share(rng: random.Random, members: list[list[int]]) -> None:
    first, second = rng.sample(range(len(members)), 2)
    members[second].append(members[first][0])
    if rng.random() < 0.3:
        members[second].pop(0)


_OPTIONS = (
    (1.0, "init_scale", (2.0, 8.0, 8.0, 1024.0, 65536.0)),
    (1.0, "growth_interval", (1, 1, 2, 3, 2000)),
    (0.15, "growth_factor", (1.5, 3.0, 1.001)),
    (0.15, "backoff_factor", (0.3, 0.7, 0.1)),
    (0.1, "dynamic", (False,)),
    (0.2, "losses", (("b",), ("b", "c"))),
    (0.15, "hysteresis", (2, 3)),
    (0.5, "hysteresis_mode", ("apex", "megatron", "deepspeed")),
    (0.4, "one_pass", (False,)),
    (0.15, "min_scale", (2.0**-20, 0.5, 1.0, 2.0)),
    (0.1, "max_scale", (2.0**17,)),
)
"""Arguments of GradScaler: how often each is given, and its choices."""


def _options(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(choices) for chance, name, choices in _OPTIONS if rng.random() < chance}


class Event(NamedTuple):
    """One event: the name of a method of the player, and its arguments."""

    name: str
    args: tuple[Any, ...] = ()


class Sequence(NamedTuple):
    setup: Setup
    events: list[Event]


_BOOL = (True, False)
_LIMIT, _NORM_TYPE = (0.1, 1.0, 2.0, 1e9), (2.0, 2.0, 2.0, 1.0, math.inf)
_EDITS = ("in place", "replaced", "data", "numpy", "collective")
_CLOSURE_EDITS = ("", "", "clip norm", "ensure", "clip value", "decay")

_EVENTS: dict[str, tuple[Any, ...]] = {
    "backward": (10, "loss_name", "terms", "overflow"),
    "zero_grad": (6, "o", _BOOL),
    "unscale": (5, "o"),
    "ensure_unscaled": (3, "o"),
    "clip_norm": (6, "o", _LIMIT, _NORM_TYPE),
    "clip_norm_of_params": (4, "params", _LIMIT, _NORM_TYPE),
    "clip_value": (3, "o", "perhaps_params", (0.1, 1.0, 100.0)),
    "edit": (6, "o", _EDITS, (0.01, 0.5, 2.0, 100.0), "params"),
    "inject": (3, "param", ("inf", "-inf", "nan"), ("in place", "data", "replaced")),
    "repair": (1, "param"),
    "edit_unscaled": (3, "o", ("torch norm", "torch value", "decay")),
    "step": (12, "o"),
    "clip_and_step": (6, "o", _LIMIT, _NORM_TYPE),
    "closure": (
        3,
        "o",
        "terms",
        (True, True, False, None),
        _CLOSURE_EDITS,
        (None, None, None, 0, 1, 2),
        "loss_name",
    ),
    "update": (8,),
    "set_scale": (2, (0.25, 1.0, 4.0, 64.0, 4096.0)),
    "end_iteration": (2, ("end_iteration", "get_scale")),
    "scale_early": (1, "loss_name", "terms"),
    "backward_early": (2,),
    "add_param_group": (2, "o", "param"),
    "register": (2, "o"),
    "drop_one": (1, "param"),
    "save": (1,),
    "load": (1,),
    "copy": (1, _BOOL),
}
"""How often each event is drawn, and for each argument the choices or the method that draws it."""


def generate(rng: random.Random) -> Sequence:
    """Make a sequence of iterations as people write them, with random events in between."""
    setup = draw_setup(rng)
    make = _Maker(rng, setup)
    events: list[Event] = []
    for _ in range(rng.randint(1, 6)):
        events += make.iteration() if rng.random() < 0.75 else make.noise(rng.randint(1, 6))
    return Sequence(setup, events)


def smaller(sequence: Sequence) -> Iterator[Sequence]:
    """Yield every sequence with fewer events, the largest cuts first, or with a simpler set-up."""
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
    def __init__(self, rng: random.Random, setup: Setup) -> None:
        self._rng = rng
        self._setup = setup
        self._count = len(setup.kinds)

    def iteration(self) -> list[Event]:
        """Return one iteration of a training loop, which sometimes contains something unusual."""
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
            chances = {"edit": 0.15, "unscale": 0.2, "edit_unscaled": 0.2, "clip_norm": 0.4}
            events += [self.draw(name, o) for name, chance in chances.items() if rng.random() < chance]
            events += self._perhaps(0.2)
            if rng.random() < 0.9:
                events.append(self.draw(rng.choice(("step", "step", "clip_and_step")), o))
            if update_each:
                events.append(Event("update"))
        if not update_each and rng.random() < 0.9:
            events.append(Event("update"))
        return events

    def noise(self, count: int) -> list[Event]:
        weights = [weight for weight, *_ in _EVENTS.values()]
        return [self.draw(name) for name in self._rng.choices(list(_EVENTS), weights, k=count)]

    def _perhaps(self, chance: float) -> list[Event]:
        return self.noise(1) if self._rng.random() < chance else []

    def draw(self, name: str, o: int | None = None) -> Event:
        """Draw the arguments of an event. If an optimizer is given, the event applies to it."""
        arguments = tuple(
            getattr(self, f"_{kind}")() if isinstance(kind, str) else self._rng.choice(kind)
            for kind in _EVENTS[name][1:]
        )
        return Event(name, arguments if o is None else (o, *arguments[1:]))

    def _o(self) -> int:
        return self._rng.randrange(self._count)

    def _param(self) -> int:
        return self._rng.randrange(PARAMS)

    def _params(self) -> tuple[int, ...]:
        return tuple(self._rng.sample(range(PARAMS), self._rng.randint(1, 3)))

    def _perhaps_params(self) -> tuple[int, ...] | None:
        return self._params() if self._rng.random() < 0.4 else None

    def _terms(self) -> tuple[tuple[int, float], ...]:
        everyone = self._rng.random() < 0.5
        params = range(PARAMS) if everyone else self._params()
        return tuple((i, float(self._rng.choice((1, 2, 3, 5, 0.5)))) for i in params)

    def _loss_name(self) -> str:
        return self._rng.choice(self._setup.names)

    def _overflow(self) -> int | None:
        return self._param() if self._rng.random() < 0.08 else None
