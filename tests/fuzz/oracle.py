"""Training in float64 without a loss scale: what the weights must be, whatever the scaler does.

The value of each true gradient is the ``.grad`` of a float64 parameter. Beside it stands what the
documentation promises: which gradients are unscaled, which wait for a step, which step must be
skipped, which call is an error. Where it promises nothing the answer is open, and what the scaler
does is taken over. Nothing here knows a class of amp_plugin.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from tests.fuzz import prelude
from tests.fuzz.scale_model import OutOfDomainError, ScaleModel
from tests.fuzz.sequences import Setup

NO, MAYBE, YES = "no", "maybe", "yes"
Terms = tuple[tuple[int, float], ...]


@dataclass
class Gradient:
    """What is promised of one parameter's gradient.

    Attributes:
        unscaled: Whether ``.grad`` shows the true gradient for sure.
        pending: Whether it is scaled and waits for its optimizers; None if that is open.
        replaced: Whether the user has replaced it since somebody looked.
        dropped: Whether the batch it came from was thrown away.
        losses: The scales to which an overflow in it must count.
        origins: The scales, with their values, of the backwards it came from.
    """

    unscaled: bool = False
    pending: bool | None = False
    replaced: bool = False
    dropped: bool = False
    losses: set[str] = field(default_factory=set)
    origins: set[tuple[str, float]] = field(default_factory=set)

    def drop(self, zeroed: bool) -> None:
        """The user has cleared it."""
        self.pending = None if zeroed and self.pending is not False else False
        self.dropped, self.replaced = True, False
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


class Oracle:
    """The float64 model.

    Attributes:
        params: The weights; ``.grad`` is the true gradient.
        optimizers: Plain torch optimizers on them.
        members: The parameters of each optimizer, by index.
        known: The optimizers that the scaler knows.
        seen: Overflows that were looked at: for an optimizer and a parameter, MAYBE or YES.
        told: Those of them that an update has followed.
        joined: Parameters that have joined an optimizer since the scaler has looked at it.
        used: The scales that a loss was scaled by.
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
        self.fused = ["fused" in kind for kind in setup.kinds]
        self.closure_first = [kind != "two_calls" for kind in setup.kinds]
        self.gradients = [Gradient() for _ in self.params]
        self.windows = [Window() for _ in self.optimizers]
        self.scales: ScaleModel = setup.scale_model()
        self.known: set[int] = set()
        self.seen: dict[tuple[int, int], str] = {}
        self.told: set[tuple[int, int]] = set()
        self.joined: set[tuple[int, int]] = set()
        self.used: set[str] = set()
        self.shown: dict[str, float] = dict.fromkeys(self.scales.names, setup.init_scale)
        self.last_backward: tuple[str, float] | None = None

    # -- questions ------------------------------------------------------------------------------

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

    def may_meet(self, o: int, joining: Iterable[int] | None = None) -> bool:
        """Whether an optimizer may be met now: all it brings comes from the last backward's scale."""
        if o in self.known and joining is None:
            return True
        new = [i for i in self.present(joining or self.members[o]) if not self.owners(i)]
        return all(
            self.gradients[i].origins <= {self.last_backward}
            and (self.gradients[i].origins or not self.params[i].grad.any())
            for i in new
        )

    def may_edit(self, index: int) -> bool:
        """Whether a change of a gradient by the user has one meaning.

        Between ``update()`` and the next backward a changed gradient may be one that an unseen
        backward has made: documented as a limit.
        """
        windows = [self.windows[o] for o in self.owners(index)]
        known = all(w.stages == {"unscaled"} or w.fresh != NO or w.folded for w in windows)
        return self.params[index].grad is not None and known

    def unscaled_window(self, indices: Iterable[int]) -> bool:
        """Whether the user may treat these gradients as unscaled ones."""
        return all(
            self.gradients[i].unscaled
            and self.owners(i)
            and all(
                self.windows[o].stages == {"unscaled"} and not self.windows[o].folded for o in self.owners(i)
            )
            for i in self.present(indices)
        )

    def error_of_unscale(self, o: int) -> str:
        """Whether ``unscale_`` is an error: called twice, or after ``step``, without new gradients."""
        window = self.windows[o]
        if window.fresh == YES or window.stages == {"ready"}:
            return NO
        sure = window.explicit or window.stages == {"stepped"}
        return YES if window.fresh == NO and sure and not window.grown else MAYBE

    def error_of_step(self, o: int) -> str:
        """Whether ``step`` is an error: called twice without new gradients or an update."""
        window = self.windows[o]
        if window.folded and window.edited:
            return MAYBE
        if window.fresh == YES or "stepped" not in window.stages:
            return NO
        sure = window.fresh == NO and window.stages == {"stepped"} and not window.grown
        return YES if sure else MAYBE

    def error_of_copy(self) -> str:
        """Whether a copy is an error: in the middle of an iteration."""
        stages = [self.windows[o].stages for o in self.known]
        waits = self._waits()
        if waits or any("ready" not in s for s in stages):
            return YES
        return NO if waits is False and all(s == {"ready"} for s in stages) else MAYBE

    def _waits(self) -> bool | None:
        """Whether a known optimizer holds scaled gradients that it has not used; None: open."""
        states = set()
        for o in self.known:
            for index in self.present(self.members[o]):
                pending = self.gradients[index].pending
                states.add(pending and None if (o, index) in self.joined else pending)
        return True if True in states else None if None in states else False

    # -- losses and backwards -------------------------------------------------------------------

    def scale(self, name: str) -> None:
        """``scale(loss, name)``: applies a requested update."""
        self.end_iteration()
        self.used.add(name)

    def end_iteration(self) -> None:
        """A requested update is applied."""
        requested = any(world.requested for world in self.scales.worlds)
        self.scales.apply()
        if requested:
            self._forget_dropped()

    def backward(self, name: str, value: Callable[[], torch.Tensor], reached: set[int]) -> None:
        """Run a backward from a loss scaled by the scale ``name``."""
        self._convert(name)
        for o, indices in enumerate(self.members):
            if not self.present(indices):
                self._forget_seen(o)
        value().backward()
        self.last_backward = (name, self.shown[name])
        for index in reached:
            gradient = self.gradients[index]
            gradient.pending, gradient.unscaled, gradient.dropped = True, False, False
            gradient.losses.add(name)
            gradient.origins.add(self.last_backward)
        for o, window in enumerate(self.windows):
            if reached & set(self.members[o]):
                window.fresh = YES
            elif window.fresh == NO:
                window.fresh = MAYBE
            window.begun.add(name)
            window.explicit = False
            if o in self.known:
                if self.disputed(o):
                    raise OutOfDomainError(
                        "a folded clip and an edit: a misuse, and nothing shows what was made of it"
                    )
                window.unfold()
        for o in sorted(self.known):
            if "unscaled" in self.windows[o].stages:  # what a later backward adds is unscaled as well
                self.check(o, certain=self.windows[o].stages == {"unscaled"}, met=False)

    def _convert(self, name: str) -> None:
        """Gradients in other units are converted before a backward adds to them."""
        for index in self.present(range(len(self.params))):
            gradient = self.gradients[index]
            if gradient.pending is not False:
                finite = self.finite([index])
                before = {self.last_backward[0]} if self.last_backward else set()
                for other in (gradient.losses | before) - {name}:
                    self.scales.record(other, {False} if finite else {False, True}, certain=False)
                if finite:  # what overflows later is not theirs
                    gradient.losses &= {name}
                else:
                    for o in self.owners(index):
                        self.windows[o].noted |= before
            else:
                gradient.losses.clear()  # they have been told
            gradient.unscaled = False
            gradient.pending = gradient.pending or None

    # -- checks ---------------------------------------------------------------------------------

    def meet(self, o: int) -> None:
        """The scaler gets to know an optimizer."""
        self.known.add(o)
        self.joined = {pair for pair in self.joined if pair[0] != o}

    def check(self, o: int, *, write: bool = True, certain: bool = True, met: bool = True) -> set[bool]:
        """Look at an optimizer's gradients: what overflowed counts for the scales.

        Args:
            o: The optimizer.
            write: Whether they are unscaled.
            certain: Whether this happens for sure.
            met: Whether the optimizer is at hand, so that parameters which have joined it are seen.

        Returns:
            The answers allowed: whether its step must be skipped.
        """
        if met:
            self.meet(o)
        window, here = self.windows[o], self.present(self.members[o])
        for index in here:
            if not self.finite([index]):
                self._see(o, index, YES if certain else MAYBE)
                for other in (other for other, members in enumerate(self.members) if index in members):
                    self._see(other, index, MAYBE)
        levels = {self.seen.get((o, index)) for index in self.members[o]}
        found = {True} if YES in levels else {True, False} if MAYBE in levels else {False}
        for index in here if certain else ():
            if self.gradients[index].pending:
                window.certain |= self.gradients[index].losses
        if not window.certain | window.begun:
            window.begun |= self.used  # a look at used gradients: whether that counts is not said
        for name in window.noted:
            self.scales.record(name, {False, True}, certain=False)
        for name in window.certain | window.begun:
            self.scales.record(name, found, certain=certain and bool(here) and name in window.certain)
        for index in here if write else ():
            gradient, sure = self.gradients[index], certain and (o, index) not in self.joined
            gradient.pending = False if sure else None
            gradient.unscaled, gradient.replaced = gradient.unscaled or sure, False
        return found

    def _see(self, o: int, index: int, level: str) -> None:
        self.seen[o, index] = YES if YES in (level, self.seen.get((o, index))) else MAYBE
        self.told.discard((o, index))

    def unscale(self, o: int, *, explicit: bool) -> None:
        """``unscale_`` and ``ensure_unscaled`` if ``explicit``; else what clipping does first."""
        window = self.windows[o]
        self.check(o)
        window.stages = {"stepped", "unscaled"} if window.stages == {"stepped"} else {"unscaled"}
        window.explicit = window.explicit or explicit
        window.fresh = NO if explicit or window.fresh == NO else MAYBE
        window.unfold()

    def fold(self, o: int, max_norm: float, norm_type: float) -> None:
        """A clip that may be left to the optimizer: whether it is unscaled is open."""
        window = self.windows[o]
        self.check(o, write=False)
        window.stages = window.stages | {"unscaled"}
        if not window.folded:
            window.unclipped = {i: self.params[i].grad.clone() for i in self.present(self.members[o])}
        window.folded, window.edited = True, False
        window.limits.append((max_norm, norm_type))
        for index in self.present(self.members[o]):
            gradient = self.gradients[index]
            gradient.pending, gradient.replaced = gradient.pending and None, False

    def clip_norm(self, indices: Iterable[int], max_norm: float, norm_type: float) -> float:
        """Clip true gradients; those that overflowed are left as they are. Returns the norm."""
        norm = self.norm(indices, norm_type)
        if math.isfinite(norm):
            factor = min(1.0, max_norm / (norm + 1e-6))
            for index in self.present(indices):
                self.params[index].grad.mul_(factor)
        return norm

    def disputed(self, o: int) -> bool:
        """Whether the user has changed gradients on which a folded clip waits.

        A misuse: it may be an error, the edit may come after the clip, or the clip after the edit.
        """
        window = self.windows[o]
        here = self.present(self.members[o])
        return window.folded and window.edited and any(i in window.unclipped for i in here)

    def take_side(self, o: int, real: Callable[[int], torch.Tensor]) -> None:
        """Go on with clip after edit where the real gradients, unscaled by now, show that."""
        window = self.windows[o]
        ours = {i: self.params[i].grad for i in self.present(self.members[o])}
        if not self.disputed(o) or not self.finite(ours) or ours.keys() != window.unclipped.keys():
            return
        for index, grad in window.unclipped.items():
            self.params[index].grad = grad
        for max_norm, norm_type in window.limits:
            self.clip_norm(self.members[o], max_norm, norm_type)
        if not all(torch.allclose(self.params[i].grad, real(i).double(), rtol=1e-4) for i in ours):
            for index, grad in ours.items():
                self.params[index].grad = grad

    # -- the user's hands -----------------------------------------------------------------------

    def edit(self, index: int, change: Callable[[torch.Tensor], object], replaced: bool = False) -> None:
        """The user changes a gradient."""
        change(self.params[index].grad)
        for o in self.owners(index):
            if index in self.windows[o].unclipped:
                change(self.windows[o].unclipped[index])
        self.gradients[index].replaced |= replaced
        self.gradients[index].dropped = not self.params[index].grad.any()
        if self.gradients[index].dropped:
            self._doubt(index)
        self._edited(index)

    def clear(self, indices: Iterable[int], zeroed: bool) -> None:
        """The user zeroes gradients in place, or drops them."""
        for index in self.present(indices):
            for o in self.owners(index):
                self.windows[o].unclipped.pop(index, None)
            if zeroed:
                self.params[index].grad.zero_()
            else:
                self.params[index].grad = None
            self.gradients[index].drop(zeroed)
            self._edited(index)
            self._doubt(index)

    def _doubt(self, index: int) -> None:
        """The overflow of a gradient that is zero now counts no more, at the latest after an update."""
        for key in [key for key in self.seen if key[1] == index]:
            self.seen[key] = MAYBE
            if key in self.told:
                del self.seen[key]

    def _edited(self, index: int) -> None:
        for o in self.owners(index):
            self.windows[o].edited = True

    def join(self, o: int, index: int) -> None:
        """``add_param_group``."""
        self.members[o].append(index)
        self.optimizers[o].add_param_group({"params": [self.params[index]]})
        self.joined.add((o, index))
        window = self.windows[o]
        window.begun |= self.gradients[index].losses
        window.grown |= self.params[index].grad is not None

    # -- steps and updates ----------------------------------------------------------------------

    def step(self, o: int, skipped: bool) -> None:
        """Step, or skip, with the true gradients."""
        if not skipped:
            self.optimizers[o].step()
        self.close(o, skipped)

    def close(self, o: int, skipped: bool) -> None:
        """A step is over."""
        for index in self.members[o]:
            gradient = self.gradients[index]
            gradient.pending = gradient.replaced = False
            self.seen.pop((o, index), None)
            for other in self.owners(index):
                if (other, index) in self.seen:
                    self.seen[other, index] = MAYBE
        self.windows[o] = Window(stages={"stepped"}, skipped=self.windows[o].skipped + skipped)

    def run_closure(self, o: int, closure: Callable[[], torch.Tensor]) -> bool:
        """Step with a closure; if it gives up, everything is put back. Returns whether it gave up."""
        optimizer = self.optimizers[o]
        weights = [p.detach().clone() for p in self.params]
        state = copy.deepcopy(optimizer.state_dict())
        try:
            optimizer.step(closure)
        except GaveUpError:
            with torch.no_grad():
                for param, weight in zip(self.params, weights, strict=True):
                    param.copy_(weight)
            optimizer.load_state_dict(state)
            return True
        return False

    def may_update(self) -> bool:
        """Whether no gradient is there that would look like one of an unseen backward."""
        return not any(
            g.replaced and not g.pending and self.params[i].grad is not None and self.owners(i)
            for i, g in enumerate(self.gradients)
        )

    def update(self, new_scale: float | None) -> None:
        """``update()``: a request; ``update(new_scale)``: at once."""
        for window in self.windows:
            window.stages, window.explicit = {"ready"}, False
            window.begun |= window.certain
            window.certain = set()
        for gradient in self.gradients:
            gradient.losses &= {self.last_backward and self.last_backward[0]}  # the others have been told
        self.seen = dict.fromkeys(self.seen, MAYBE)
        waits = self._waits()
        if new_scale is not None:
            self.scales.fill(new_scale, self.used)
        else:
            self.scales.request(waits)
        if new_scale is not None or waits is False:
            self._forget_dropped()

    def _forget_dropped(self) -> None:
        """An overflow is forgotten once an update has followed it and its batch was thrown away."""
        self.seen = {key: level for key, level in self.seen.items() if not self.gradients[key[1]].dropped}
        self.told |= set(self.seen)

    def _forget_seen(self, o: int) -> None:
        self.seen = {key: level for key, level in self.seen.items() if key[0] != o}

    def copied(self) -> None:
        """The scaler was replaced by a copy, which knows no optimizer."""
        self.known.clear()
        self.seen.clear()
        self.last_backward = None
        for window in self.windows:
            window.__dict__.update(Window().__dict__)
        for gradient in self.gradients:
            gradient.__dict__.update(Gradient(pending=None).__dict__)


class GaveUpError(Exception):
    """Leaves a closure whose gradients overflowed."""
