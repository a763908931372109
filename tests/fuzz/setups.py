"""What a random sequence starts with: optimizers, their parameters, and the scaler's options."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.scale_model import DEFAULT, ScaleModel

PARAMS = 5

_KINDS = {
    "sgd": 4,
    "sgd_momentum": 2,
    "sgd_fused": 4,
    "sgd_fused_momentum": 3,
    "adamw_fused": 4,
    "adamw_foreach": 3,
    "third_party": 2,
    "counting": 1,
    "lbfgs": 1,
    "two_calls": 1,
    "takes_gradients": 0.3,
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a sequence starts with."""

    kinds: tuple[str, ...]  # of the optimizers, by the names of :mod:`tests.fuzz.prelude`
    members: tuple[tuple[int, ...], ...]  # the parameters of each, by index; one may have several optimizers
    registered: tuple[bool, ...]  # at the start
    options: dict[str, Any] = field(default_factory=dict)  # of GradScaler

    @property
    def init_scale(self) -> float:
        return self.options.get("init_scale", 2.0**16)

    @property
    def names(self) -> tuple[str, ...]:
        return (DEFAULT, *self.options.get("losses", ()))

    def weights(self) -> list[list[float]]:
        return [[0.5 + 0.25 * i, 1.25 - 0.5 * i] for i in range(PARAMS)]

    def scale_model(self) -> ScaleModel:
        """The model of the scales: torch's rule, with a floor only where one was asked for."""
        return ScaleModel(self.names, self.options)


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
        _share(rng, chosen, members)
    known = rng.choice((1.0, 1.0, 1.0, 0.5, 0.0))
    return Setup(
        kinds=chosen,
        members=tuple(map(tuple, members)),
        registered=tuple(rng.random() < known for _ in chosen),
        options=_options(rng),
    )


def _share(rng: random.Random, kinds: tuple[str, ...], members: list[list[int]]) -> None:
    first, second = rng.sample(range(len(members)), 2)
    if "takes_gradients" not in (kinds[first], kinds[second]):
        members[second].append(members[first][0])
        if rng.random() < 0.3:
            members[second].pop(0)


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "init_scale": 2.0 ** rng.choice((1, 3, 3, 10, 16)),
        "growth_interval": rng.choice((1, 1, 2, 3, 2000)),
    }
    if rng.random() < 0.15:
        options["growth_factor"] = rng.choice((1.5, 3.0, 1.001))
        options["backoff_factor"] = rng.choice((0.3, 0.7, 0.1))
    if rng.random() < 0.1:
        options["dynamic"] = False
    if rng.random() < 0.2:
        options["losses"] = rng.choice((("b",), ("b", "c")))
    if rng.random() < 0.15:
        options["hysteresis"] = rng.choice((2, 3))
        options["hysteresis_mode"] = rng.choice(("apex", "megatron", "deepspeed"))
    if rng.random() < 0.4:
        options["one_pass"] = False
    if rng.random() < 0.15:
        options["min_scale"] = 2.0 ** rng.choice((-20, -1, 0, 1))
    if rng.random() < 0.1:
        options["max_scale"] = 2.0**17
    return options
