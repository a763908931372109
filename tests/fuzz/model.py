"""What the oracle knows: float64 weights and gradients, what is promised of them, and which overflows were seen."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch

from tests.fuzz import prelude
from tests.fuzz.scale_model import ScaleModel
from tests.fuzz.setups import Setup

NO, MAYBE, YES = "no", "maybe", "yes"


class SeenOverflows:
    """For an optimizer and a parameter: whether an overflow was seen since the optimizer's last step.

    MAYBE where it is open whether it still counts.
    """

    def __init__(self) -> None:
        self._levels: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()  # those that an update has followed

    def see(self, o: int, index: int, level: str) -> None:
        """A gradient that is not finite was looked at."""
        self._levels[o, index] = YES if YES in (level, self._levels.get((o, index))) else MAYBE
        self._told.discard((o, index))

    def join(self, o: int, index: int, owners: Iterable[int]) -> None:
        """A parameter joins an optimizer: what its owners must skip for, the new one must too."""
        levels = {self._levels.get((owner, index), NO) for owner in owners}
        if levels - {NO}:
            self.see(o, index, YES if levels == {YES} else MAYBE)

    def skips(self, o: int, indices: Iterable[int]) -> set[bool]:
        """The answers allowed: whether the optimizer's step must be skipped."""
        levels = {self._levels.get((o, index)) for index in indices}
        return {True} if YES in levels else {True, False} if MAYBE in levels else {False}

    def doubt(self, index: int, *, dropped: bool = True) -> None:
        """A gradient is zero or gone: its overflow counts no more, at the latest after an update.

        Unless the others of its optimizers are not zero (``dropped`` is False): who writes zeros over one gradient
        has dropped no batch.
        """
        for key in [key for key in self._levels if key[1] == index]:
            self._levels[key] = MAYBE
            if dropped and key in self._told:
                del self._levels[key]

    def update(self) -> None:
        """An update was requested: from now on it may be forgotten."""
        self._levels = dict.fromkeys(self._levels, MAYBE)

    def tell(self, dropped: Container[int]) -> None:
        """An update was applied: overflows whose gradients were dropped are forgotten."""
        self._levels = {key: level for key, level in self._levels.items() if key[1] not in dropped}
        self._told |= set(self._levels)

    def step(self, o: int, indices: Iterable[int]) -> None:
        """An optimizer has stepped: it starts anew, and for others that share a gradient it is open."""
        for index in indices:
            self._levels.pop((o, index), None)
            for key in [key for key in self._levels if key[1] == index]:
                self._levels[key] = MAYBE

    def forget(self, o: int) -> None:
        """All gradients of an optimizer were gone when a backward began."""
        self._levels = {key: level for key, level in self._levels.items() if key[0] != o}

    def clear(self) -> None:
        """Forget everything."""
        self._levels.clear()
        self._told.clear()


@dataclass
class Gradient:
    """What is promised of one parameter's gradient.

    Attributes:
        unscaled: Whether ``.grad`` shows the true gradient for sure.
        pending: Whether it is scaled and waits for its optimizers; None if that is open.
        replaced: Whether the user has replaced it since somebody looked.
        dropped: Whether the batch it came from was thrown away.
        used_by: The optimizers that have stepped with it since it was last unscaled, or a backward began.
        used_at: How many updates had been requested when it was last unscaled or stepped with.
        assumed: Whether it was taken for a scaled one without a backward, and is not unscaled yet.
        losses: The scales to which an overflow in it must count.
        origins: The scales, with their values, of the backwards it came from.
    """

    unscaled: bool = False
    pending: bool | None = False
    replaced: bool = False
    dropped: bool = False
    used_by: set[int] = field(default_factory=set)
    used_at: int = -1
    assumed: bool = False
    losses: set[str] = field(default_factory=set)
    origins: set[tuple[str, float]] = field(default_factory=set)

    def clear(self, zeroed: bool) -> None:
        """The user has cleared it."""
        self.pending = None if zeroed and self.pending is not False else False
        self.replaced = False
        self.losses, self.origins = set(), set()


@dataclass
class Window:
    """What is promised of one optimizer since its last step.

    Attributes:
        stages: The stages it may be in: ready, unscaled, stepped.
        fresh: Whether a scaled backward has reached it since it was last unscaled or stepped; MAYBE if
            one has run that did not reach it.
        explicit: Whether ``unscale_`` or ``ensure_unscaled`` was the last to unscale it.
        grown: Whether a parameter with a gradient has joined it.
        certain: The scales for which its checks count.
        begun: The scales for which they may count.
        noted: The scales for which an overflow may count that a conversion has found.
        folded: Whether a clip may wait in it for the step.
        edited: Whether the user has changed gradients since: then the step may be refused.
        limits: The clips that may wait, as largest norm and type.
        unclipped: The gradients without those clips, but with what the user has done since.
        skipped: Steps skipped so far.
    """

    stages: set[str] = field(default_factory=lambda: {"ready"})
    fresh: str = NO
    explicit: bool = False
    grown: bool = False
    certain: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    noted: set[str] = field(default_factory=set)
    folded: bool = False
    edited: bool = False
    limits: list[tuple[float, float]] = field(default_factory=list)
    unclipped: dict[int, torch.Tensor] = field(default_factory=dict)
    skipped: int = 0

    def unfold(self) -> None:
        """No clip waits any more."""
        self.folded = self.edited = False
        self.limits, self.unclipped = [], {}


class Model:
    """Weights trained in float64 without a loss scale, and what is promised beside them.

    Attributes:
        params: The weights; ``.grad`` is the true gradient.
        optimizers: Plain torch optimizers on them.
        members: The parameters of each optimizer, by index.
        known: The optimizers that the scaler knows, in the order in which it has met them.
        joined: Parameters that have joined an optimizer since the scaler has looked at it.
        seen: Overflows that were looked at.
        used: The scales that a loss was scaled by.
        updates: How many updates were requested.
        shown: The scales as last seen.
        last_backward: The scale, and its value, of the last backward from a scaled loss.
    """

    def __init__(self, setup: Setup) -> None:
        self.params = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in setup.weights()]
        self.members = [list(indices) for indices in setup.members]
        self.optimizers = [
            prelude.plain(kind, [self.params[i] for i in indices])
            for kind, indices in zip(setup.kinds, setup.members, strict=True)
        ]
        self.gradients = [Gradient() for _ in self.params]
        self.windows = [Window() for _ in self.optimizers]
        self.scales: ScaleModel = setup.scale_model()
        self.seen = SeenOverflows()
        self.known: dict[int, None] = {}
        self.joined: set[tuple[int, int]] = set()
        self.used: set[str] = set()
        self.updates = 0
        self.shown: dict[str, float] = dict.fromkeys(self.scales.names, setup.init_scale)
        self.last_backward: tuple[str, float] | None = None

    def owners(self, index: int) -> list[int]:
        """The known optimizers that step a parameter."""
        return [o for o in sorted(self.known) if index in self.members[o]]

    def present(self, indices: Iterable[int]) -> list[int]:
        """Those of some parameters that have a gradient."""
        return [i for i in indices if self.params[i].grad is not None]

    def finite(self, indices: Iterable[int]) -> bool:
        """Whether all gradients of some parameters are finite."""
        return all(self.params[i].grad.isfinite().all() for i in self.present(indices))

    def norm(self, indices: Iterable[int], norm_type: float) -> float:
        """The norm of the true gradients."""
        flat = [self.params[i].grad.flatten() for i in self.present(indices)]
        return torch.linalg.vector_norm(torch.cat(flat), norm_type).item() if flat else 0.0
