"""torch's rule for a loss scale. If the documentation allows several results, the model allows them too.

``update()`` is a request, and it is not specified for some checks whether they count for a scale. So the
model keeps every state that the documentation allows. Each value that the scaler shows rules some of them
out. If none is left, the scaler has done something that it must not do.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

DEFAULT = ""  # the name of the scale for losses that were scaled without a name
_TOO_MANY = 4096


class Disagreement(AssertionError):
    """The scaler's result is not one that the oracle allows."""


class OutOfDomainError(Exception):
    """The sequence cannot be compared any further, so it ends here."""


class Scale(NamedTuple):
    """One loss scale."""

    value: float
    tracker: int  # updates without overflow since the scale last changed
    tolerance: int  # overflows still tolerated, including the one that lowers the scale
    found: bool | None = None  # an overflow was found since the last update; None if nothing was checked


class World(NamedTuple):
    """One possible state: whether an update is requested, and each scale."""

    requested: bool
    scales: tuple[Scale, ...]


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


_RULE = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "min_scale": 0.0,
    "max_scale": float32(3.4028234e38),
    "dynamic": True,
    "hysteresis": 1,
    "hysteresis_mode": "apex",
}


class ScaleModel:
    """All states that the loss scales may be in."""

    def __init__(self, names: Iterable[str], options: dict[str, Any]) -> None:
        rule = {**_RULE, **options}
        self.names, self.is_dynamic = tuple(names), rule["dynamic"]
        self.growth_factor, self.backoff_factor = rule["growth_factor"], rule["backoff_factor"]
        self.growth_interval, self._mode = rule["growth_interval"], rule["hysteresis_mode"]
        self._floor, self._ceiling = rule["min_scale"], rule["max_scale"]
        self._hysteresis = rule["hysteresis"] if self.is_dynamic else 1
        start = Scale(rule["init_scale"], 0, self._hysteresis)
        self.worlds = {World(requested=False, scales=(start,) * len(self.names))}

    # -- what happens ---------------------------------------------------------------------------

    def record(self, name: str, found: set[bool], certain: bool) -> None:
        """A check counts for a scale, certainly or possibly."""
        place = self.names.index(name)

        def outcomes(world: World) -> Iterable[World]:
            if not certain:
                yield world
            for value in found:
                yield _changed(world, place, found=bool(world.scales[place].found) or value)

        self._branch(outcomes)

    def request(self, waits: bool | None) -> None:
        """Do ``update()``. It is applied now (False), later (True), or it is not specified when (None)."""
        self._branch(lambda world: [world._replace(requested=True)])
        if waits is None:
            self.perhaps_apply()
        elif not waits:
            self.apply()

    def apply(self) -> None:
        self._branch(lambda world: [self._applied(world)])

    def perhaps_apply(self) -> None:
        self._branch(lambda world: [world, self._applied(world)])

    def fill(self, value: float, used: set[str]) -> None:
        """Do ``update(value)``, which sets all scales that were used, and possibly the others."""

        def outcomes(world: World) -> Iterable[World]:
            for everyone in (False, True):
                for lowest in (None, False):  # an earlier check without overflow may still count
                    scales = tuple(
                        s._replace(
                            found=None if s.found is None else lowest,
                            value=value if everyone or n in used else s.value,
                        )
                        for n, s in self._of(world)
                    )
                    yield World(requested=False, scales=scales)

        self._branch(outcomes)

    def load(self, state: dict[str, tuple[float, int, int]]) -> None:
        self.worlds = {World(requested=False, scales=tuple(Scale(*state[name]) for name in self.names))}

    def copied(self) -> None:
        """Copy between iterations. A requested update is applied, and earlier checks may be lost."""

        def outcomes(world: World) -> Iterable[World]:
            after = self._applied(world)
            yield after
            yield World(requested=False, scales=tuple(s._replace(found=None) for s in after.scales))

        self._branch(outcomes)

    # -- what the scaler shows ------------------------------------------------------------------

    def see(self, shown: dict[str, float]) -> None:
        self._keep(
            lambda world: all(s.value == shown[n] for n, s in self._of(world)), f"get_scale() is {shown}"
        )

    def see_state(self, shown: dict[str, tuple[float, int, int]]) -> None:
        """See a saved state. Without hysteresis the third number decides nothing, and it is not saved."""
        count = 2 if self._hysteresis == 1 else 3
        self._keep(
            lambda world: all(s[:count] == shown[n][:count] for n, s in self._of(world)),
            f"state_dict() says {shown}",
        )

    def largest(self) -> float:
        return max(scale.value for world in self.worlds for scale in world.scales)

    def smallest(self) -> float:
        return min(scale.value for world in self.worlds for scale in world.scales)

    # -- the rule -------------------------------------------------------------------------------

    def _applied(self, world: World) -> World:
        if not world.requested:
            return world
        return World(requested=False, scales=tuple(self._updated(scale) for scale in world.scales))

    def _updated(self, scale: Scale) -> Scale:
        if scale.found is None or not self.is_dynamic:
            return scale._replace(found=None)
        if scale.found:
            return self._lowered(scale)
        tolerance = self._hysteresis if self._mode == "apex" else scale.tolerance
        if scale.tracker + 1 < self.growth_interval:
            return Scale(scale.value, scale.tracker + 1, tolerance)
        higher = min(float32(scale.value * self.growth_factor), max(scale.value, self._ceiling))
        return Scale(higher, 0, self._hysteresis)

    def _lowered(self, scale: Scale) -> Scale:
        tolerance = scale.tolerance - 1
        if self._mode == "deepspeed":
            tolerance = max(tolerance, 1)
        used_up = scale.tolerance <= 1
        lower = max(float32(scale.value * self.backoff_factor), min(scale.value, self._floor))
        return Scale(lower if used_up else scale.value, 0, tolerance)

    def _of(self, world: World) -> Iterable[tuple[str, Scale]]:
        return zip(self.names, world.scales, strict=True)

    def _branch(self, outcomes: Callable[[World], Iterable[World]]) -> None:
        self.worlds = {after for world in self.worlds for after in outcomes(world)}
        if len(self.worlds) > _TOO_MANY:
            raise OutOfDomainError("too much is open")

    def _keep(self, matches: Callable[[World], bool], seen: str) -> None:
        kept = {world for world in self.worlds if matches(world)}
        if not kept:
            allowed = sorted({tuple(s[:3] for s in world.scales) for world in self.worlds})
            raise Disagreement(
                f"the scale: {seen}, the rule allows (value, tracker, tolerance) of {self.names}: {allowed}"
            )
        self.worlds = kept


def _changed(world: World, place: int, **changes: Any) -> World:
    scales = list(world.scales)
    scales[place] = scales[place]._replace(**changes)
    return world._replace(scales=tuple(scales))
