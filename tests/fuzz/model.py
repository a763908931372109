"""The state of the oracle: float64 weights and gradients, promises about them, and overflows so far."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch

from tests.fuzz import prelude
from tests.fuzz.scale_model import ScaleModel
from tests.fuzz.sequences import Setup

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
        self._levels.clear()
        self._told.clear()


@dataclass
class Gradient:
    """What is promised of one parameter's gradient."""

    unscaled: bool = False  # ``.grad`` shows the true gradient for sure
    pending: bool | None = False  # it is scaled and waits for its optimizers; None if that is open
    replaced: bool = False  # by the user, since somebody looked
    dropped: bool = False  # the batch it came from was thrown away
    # The optimizers that have stepped with it since it was last unscaled, or a backward began.
    used_by: set[int] = field(default_factory=set)
    used_at: int = -1  # updates that had been requested when it was last unscaled or stepped with
    assumed: bool = False  # it was taken for a scaled one without a backward, and is not unscaled yet
    losses: set[str] = field(default_factory=set)  # the scales to which an overflow in it must count
    origins: set[tuple[str, float]] = field(default_factory=set)  # scales and values of its backwards

    def clear(self, zeroed: bool) -> None:
        self.pending = None if zeroed and self.pending is not False else False
        self.replaced = False
        self.losses, self.origins = set(), set()


@dataclass
class Window:
    """What is promised of one optimizer since its last step."""

    stages: set[str] = field(default_factory=lambda: {"ready"})  # it may be in: ready, unscaled, stepped
    # Whether a scaled backward has reached it since it was last unscaled or stepped; MAYBE if one has run that did not.
    fresh: str = NO
    explicit: bool = False  # ``unscale_`` or ``ensure_unscaled`` was the last to unscale it
    grown: bool = False  # a parameter with a gradient has joined it
    certain: set[str] = field(default_factory=set)  # the scales for which its checks count
    begun: set[str] = field(default_factory=set)  # those for which they may count
    noted: set[str] = field(default_factory=set)  # those for which an overflow in a conversion may count
    checked: str = NO  # a gradient was looked at since; MAYBE if only by another, or before an update
    skipped: int = 0  # steps so far


class Model:
    """Weights trained in float64 without a loss scale, and what is promised beside them."""

    def __init__(self, setup: Setup) -> None:
        # The weights; ``.grad`` is the true gradient.
        self.params = [torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in setup.weights()]
        self.members = [list(indices) for indices in setup.members]
        self.optimizers = [
            prelude.plain(kind, [self.params[i] for i in indices])
            for kind, indices in zip(setup.kinds, setup.members, strict=True)
        ]
        self.gradients = [Gradient() for _ in self.params]
        self.windows = [Window() for _ in self.optimizers]
        self.scales = ScaleModel(setup.names, setup.options)
        self.seen = SeenOverflows()
        self.known: dict[int, None] = {}  # optimizers, in the order in which the scaler has met them
        self.joined: set[tuple[int, int]] = (
            set()
        )  # (optimizer, parameter) that the scaler has not looked at since
        self.used: set[str] = set()  # scales
        self.updates = 0  # requested
        self.shown: dict[str, float] = dict.fromkeys(self.scales.names, self.scales.largest())
        self.last_backward: tuple[str, float] | None = None  # its scale, and the value of that

    def owners(self, index: int) -> list[int]:
        """The known optimizers that step a parameter."""
        return [o for o in sorted(self.known) if index in self.members[o]]

    def present(self, indices: Iterable[int]) -> list[int]:
        return [i for i in indices if self.params[i].grad is not None]

    def finite(self, indices: Iterable[int]) -> bool:
        return all(self.params[i].grad.isfinite().all() for i in self.present(indices))

    def norm(self, indices: Iterable[int], norm_type: float) -> float:
        flat = [self.params[i].grad.flatten() for i in self.present(indices)]
        return torch.linalg.vector_norm(torch.cat(flat), norm_type).item() if flat else 0.0


# -- what the documentation says of a call before it is made ---------------------------------------
# Whether it has one meaning, and whether it is an error: NO, MAYBE or YES.


def may_meet(model: Model, o: int, joining: Iterable[int] | None = None) -> bool:
    """Return whether an optimizer may be met now: all it brings comes from the last backward's scale.

    An optimizer that is met later is a limit that the documentation names.
    """
    if o in model.known and joining is None:
        return True
    new = [i for i in model.present(joining or model.members[o]) if not model.owners(i)]
    return all(
        model.gradients[i].origins <= {model.last_backward}
        and (model.gradients[i].origins or not model.params[i].grad.any())
        for i in new
    )


def may_edit(model: Model, index: int) -> bool:
    """Return whether a change of a gradient by the user has one meaning.

    That of one which an optimizer has stepped with has: the change of an unscaled gradient before ``update()``,
    of a scaled one after it. Of others a change between ``update()`` and the next backward may come from a
    backward that was not seen: documented as a limit.
    """
    gradient = model.gradients[index]
    return model.params[index].grad is not None and all(
        o in gradient.used_by or w.stages == {"unscaled"} or w.fresh != NO
        for o, w in ((o, model.windows[o]) for o in model.owners(index))
    )


def may_update(model: Model) -> bool:
    """Return whether no gradient would look as if an unseen backward had made it after ``update()``."""
    return not any(
        gradient.replaced and not gradient.pending and set(model.owners(i)) - gradient.used_by
        for i, gradient in enumerate(model.gradients)
        if model.params[i].grad is not None
    )


def are_unscaled(model: Model, indices: Iterable[int]) -> bool:
    """Return whether the user may treat these gradients as unscaled ones."""
    present = model.present(indices)
    windows = [model.windows[o] for i in present for o in model.owners(i)]
    return all(model.gradients[i].unscaled and model.owners(i) for i in present) and all(
        w.stages == {"unscaled"} for w in windows
    )


def error_of_unscale(model: Model, o: int) -> str:
    """Return whether ``unscale_`` is an error: called twice, or after ``step``, without new gradients."""
    window = model.windows[o]
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    if window.fresh == YES or window.stages == {"ready"}:
        return NO
    sure = window.explicit or window.stages == {"stepped"}
    return YES if window.fresh == NO and sure and not window.grown else MAYBE


def error_of_step(model: Model, o: int, *, is_known: bool) -> str:
    """Return whether ``step`` is an error.

    It is if it was called twice without new gradients, if all have stepped without an update, or if a scaled
    backward has run and no gradient of an optimizer that was known then was ever checked.
    """
    window = model.windows[o]
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    if is_known and window.checked != YES and window.fresh != NO and not model.present(model.members[o]):
        others = [other for other in model.known if other != o]
        if any(model.present(model.members[other]) for other in others):
            return NO
        is_open = window.checked == MAYBE or any(model.windows[other].fresh != YES for other in others)
        return MAYBE if is_open else window.fresh
    if window.fresh == YES or "stepped" not in window.stages:
        return NO
    sure = window.fresh == NO and window.stages == {"stepped"} and not window.grown
    return YES if sure else MAYBE


def error_of_missing_update(model: Model, o: int) -> str:
    """Return whether an optimizer may not begin again: each one known has stepped since the last update."""
    stages = [model.windows[other].stages for other in {*model.known, o}]
    if not model.scales.is_dynamic or any("stepped" not in s for s in stages):
        return NO
    return YES if all(s == {"stepped"} for s in stages) else MAYBE


def error_of_copy(model: Model) -> str:
    """Return whether a copy is an error: in the middle of an iteration."""
    stages = [model.windows[o].stages for o in model.known]
    waits = update_waits(model)
    if waits or any("ready" not in s for s in stages):
        return YES
    return NO if waits is False and all(s == {"ready"} for s in stages) else MAYBE


def update_waits(model: Model) -> bool | None:
    """Return whether a known optimizer holds scaled gradients that it has not used; None: open."""
    states = set()
    for o in model.known:
        for index in model.present(model.members[o]):
            pending = model.gradients[index].pending
            states.add(pending and None if (o, index) in model.joined else pending)
    return True if True in states else None if None in states else False
