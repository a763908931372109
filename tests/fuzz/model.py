"""The oracle's state: float64 weights and gradients, promises about them, and the overflows so far.

A *promise* is something that the documentation guarantees. Where it guarantees nothing, the state is MAYBE or
None.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch

from tests.fuzz import prelude
from tests.fuzz.scale_model import ScaleModel
from tests.fuzz.sequences import Setup

NO, MAYBE, YES = "no", "maybe", "yes"


class SeenOverflows:
    """For each optimizer and parameter: was an overflow seen since the optimizer's last step?

    MAYBE means that the documentation does not say whether the overflow still counts.
    """

    def __init__(self) -> None:
        self._levels: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()  # overflows after which an update was applied

    def see(self, o: int, index: int, level: str) -> None:
        """Record that a check saw a gradient that is not finite."""
        self._levels[o, index] = YES if YES in (level, self._levels.get((o, index))) else MAYBE
        self._told.discard((o, index))

    def join(self, o: int, index: int, owners: Iterable[int]) -> None:
        """A parameter joins an optimizer.

        An overflow that its owners must skip for counts for the new owner too.
        """
        levels = {self._levels.get((owner, index), NO) for owner in owners}
        if levels - {NO}:
            self.see(o, index, YES if levels == {YES} else MAYBE)

    def skips(self, o: int, indices: Iterable[int]) -> set[bool]:
        """Return the allowed answers to the question whether the optimizer's step is skipped."""
        levels = {self._levels.get((o, index)) for index in indices}
        return {True} if YES in levels else {True, False} if MAYBE in levels else {False}

    def doubt(self, index: int, *, dropped: bool = True) -> None:
        """A gradient is now zero or None, so its overflow stops to count, at the latest after an update.

        If the other gradients of its optimizers are not zero, ``dropped`` is False: zeroing one gradient does
        not discard a batch.
        """
        for key in [key for key in self._levels if key[1] == index]:
            self._levels[key] = MAYBE
            if dropped and key in self._told:
                del self._levels[key]

    def update(self) -> None:
        """An update was requested. From now on an overflow may be forgotten."""
        self._levels = dict.fromkeys(self._levels, MAYBE)

    def tell(self, dropped: Container[int]) -> None:
        """An update was applied. Overflows whose gradients were dropped are forgotten."""
        self._levels = {key: level for key, level in self._levels.items() if key[1] not in dropped}
        self._told |= set(self._levels)

    def step(self, o: int, indices: Iterable[int]) -> None:
        """An optimizer has stepped, so its overflows are forgotten.

        For optimizers that share a gradient, it becomes MAYBE.
        """
        for index in indices:
            self._levels.pop((o, index), None)
            for key in [key for key in self._levels if key[1] == index]:
                self._levels[key] = MAYBE

    def forget(self, o: int) -> None:
        """All gradients of an optimizer were None when a backward pass began."""
        self._levels = {key: level for key, level in self._levels.items() if key[0] != o}

    def clear(self) -> None:
        self._levels.clear()
        self._told.clear()


@dataclass
class Gradient:
    """What the documentation promises about the gradient of one parameter."""

    unscaled: bool = False  # ``.grad`` is certainly the true gradient
    pending: bool | None = False  # it is scaled and not used yet; None if that is not specified
    replaced: bool = False  # the user has replaced it since it was last checked
    dropped: bool = False  # the batch that it came from was discarded
    # The optimizers that have stepped with it since it was last unscaled or a backward pass began.
    used_by: set[int] = field(default_factory=set)
    used_at: int = -1  # number of updates requested when it was last unscaled or used in a step
    assumed: bool = False  # it was assumed to be scaled although no backward ran, and is not unscaled yet
    losses: set[str] = field(default_factory=set)  # the scales that an overflow in it must count for
    # (scale, value of the scale) of each backward that added to it
    origins: set[tuple[str, float]] = field(default_factory=set)

    def clear(self, zeroed: bool) -> None:
        self.pending = None if zeroed and self.pending is not False else False
        self.replaced = False
        self.losses, self.origins = set(), set()


@dataclass
class Window:
    """What the documentation promises about one optimizer since its last step."""

    # the stages it may be in: ready, unscaled, stepped
    stages: set[str] = field(default_factory=lambda: {"ready"})
    # Whether a scaled backward has reached it since it was last unscaled or stepped. MAYBE if only backwards
    # ran that did not reach it.
    fresh: str = NO
    explicit: bool = False  # it was last unscaled by ``unscale_`` or ``ensure_unscaled``
    grown: bool = False  # a parameter with a gradient has joined it
    certain: set[str] = field(default_factory=set)  # the scales that its checks certainly count for
    begun: set[str] = field(default_factory=set)  # the scales that its checks may count for
    # the scales that an overflow during a conversion may count for
    noted: set[str] = field(default_factory=set)
    checked: str = NO  # a gradient was checked; MAYBE if only through another optimizer, or before an update
    skipped: int = 0  # skipped steps so far
    must_step: bool = False  # its gradients may have been unscaled since its last step


class Model:
    """Weights that are trained in float64 without a loss scale, and the promises about them."""

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
        self.known: dict[int, None] = {}  # optimizers, in the order in which the scaler first saw them
        self.joined: set[tuple[int, int]] = (
            set()
        )  # (optimizer, parameter) pairs that joined since the scaler last checked the optimizer
        self.used: set[str] = set()  # names of the scales that were used
        self.updates = 0  # number of requested updates
        self.checked = NO  # gradients were checked since the last requested update
        self.shown: dict[str, float] = dict.fromkeys(self.scales.names, self.scales.largest())
        self.last_backward: tuple[str, float] | None = None  # the name and the value of its scale

    def owners(self, index: int) -> list[int]:
        """Return the known optimizers that have a parameter."""
        return [o for o in sorted(self.known) if index in self.members[o]]

    def present(self, indices: Iterable[int]) -> list[int]:
        return [i for i in indices if self.params[i].grad is not None]

    def finite(self, indices: Iterable[int]) -> bool:
        return all(self.params[i].grad.isfinite().all() for i in self.present(indices))

    def norm(self, indices: Iterable[int], norm_type: float) -> float:
        flat = [self.params[i].grad.flatten() for i in self.present(indices)]
        return torch.linalg.vector_norm(torch.cat(flat), norm_type).item() if flat else 0.0


# Functions named ``may_...`` return whether a call has a specified meaning. Those named ``error_of_...``
# return whether it is an error: NO, MAYBE or YES.


def may_meet(model: Model, o: int, joining: Iterable[int] | None = None) -> bool:
    """Return whether the scaler may see an optimizer for the first time now.

    It may if all gradients that the optimizer brings come from the last backward's scale. Otherwise it is too
    late; the documentation names this limit.
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
    """Return whether a change of a gradient by the user has one specified meaning.

    It has one if an optimizer has stepped with the gradient: before ``update()`` the user changes an unscaled
    gradient, after it a scaled one. For other gradients, a change between ``update()`` and the next backward
    may look like a backward that was not seen. The documentation names this limit.
    """
    gradient = model.gradients[index]
    return model.params[index].grad is not None and all(
        o in gradient.used_by or w.stages == {"unscaled"} or w.fresh != NO
        for o, w in ((o, model.windows[o]) for o in model.owners(index))
    )


def may_update(model: Model) -> bool:
    """Return whether after ``update()`` every gradient is still recognized.

    A gradient that the user replaced could look as if an unseen backward had made it.
    """
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
    """Return whether ``unscale_`` is an error: it was called twice, or after ``step``, without new gradients."""
    window = model.windows[o]
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    if window.fresh == YES or window.stages == {"ready"}:
        return NO
    sure = window.explicit or window.stages == {"stepped"}
    return YES if window.fresh == NO and sure and not window.grown else MAYBE


def error_of_update(model: Model) -> str:
    """Return whether ``update()`` is an error: no gradient was checked since the last one."""
    return {NO: YES, MAYBE: MAYBE, YES: NO}[model.checked]


def error_of_step(model: Model, o: int) -> str:
    """Return whether ``step`` is an error.

    It is one if it is called twice without new gradients, or if all optimizers have stepped and ``update()``
    was not called. It is also one if the optimizer has no gradient, none was checked, and the same is true of
    all other optimizers.
    """
    window = model.windows[o]
    due = error_of_missing_update(model, o)
    if due != NO:
        return due
    twice = NO
    if window.fresh != YES and "stepped" in window.stages:
        sure = window.fresh == NO and window.stages == {"stepped"} and not window.grown
        twice = YES if sure else MAYBE
    others = [other for other in model.known if other != o]
    nothing = window.checked != YES and not model.present(model.members[o])
    if twice == YES or not nothing or any(model.present(model.members[other]) for other in others):
        return twice
    is_open = window.checked == MAYBE or any(model.windows[other].fresh != YES for other in others)
    return MAYBE if is_open else YES


def error_of_missing_update(model: Model, o: int) -> str:
    """Return whether the optimizer must not start a new iteration: every known one has stepped since the last
    update.
    """
    stages = [model.windows[other].stages for other in {*model.known, o}]
    if not model.scales.is_dynamic or any("stepped" not in s for s in stages):
        return NO
    return YES if all(s == {"stepped"} for s in stages) else MAYBE


def error_of_copy(model: Model) -> str:
    """Return whether a copy is an error, which it is in the middle of an iteration."""
    stages = [model.windows[o].stages for o in model.known]
    waits = update_waits(model)
    if waits or any("ready" not in s for s in stages):
        return YES
    return NO if waits is False and all(s == {"ready"} for s in stages) else MAYBE


def update_waits(model: Model) -> bool | None:
    """Return whether a known optimizer has scaled gradients that it has not used; None if that is not
    specified.
    """
    states = set()
    if len(model.known) > 1 and any(model.windows[o].must_step for o in model.known):
        states.add(None)
    for o in model.known:
        for index in model.present(model.members[o]):
            pending = model.gradients[index].pending
            states.add(pending and None if (o, index) in model.joined else pending)
    return True if True in states else None if None in states else False
