"""Training in float64 without a loss scale: the weights that are right, whatever the scaler does.

The ``.grad`` of each float64 parameter is the true gradient. Next to it are the promises of the
documentation: which gradients are unscaled, which wait for a step, and which step must be skipped. If nothing
is promised, every answer is accepted, and the scaler's answer is adopted. This file uses no class of
amp_plugin.
"""

import copy
import math
from collections.abc import Callable, Iterable

import torch

from tests.fuzz.model import MAYBE, NO, YES, Gradient, Model, Window, update_waits
from tests.fuzz.scale_model import DEFAULT


class GaveUpError(Exception):
    """Raised to leave a closure whose gradients overflowed."""


class Oracle(Model):
    """The model, and the effect of each call on it."""

    # -- losses and backwards -------------------------------------------------------------------

    def scale(self, name: str) -> None:
        """Do ``scale(loss, name)``, which first applies a requested update."""
        self.end_iteration()
        self.used.add(name)

    def end_iteration(self) -> None:
        """Apply a requested update."""
        requested = any(world.requested for world in self.scales.worlds)
        self.scales.apply()
        if requested:
            self._tell_overflows()

    def backward(self, name: str, value: Callable[[], torch.Tensor], reached: set[int]) -> None:
        """Run a backward pass of a loss that is scaled by ``name``.

        ``reached`` are the parameters that it reaches.
        """
        self._convert(name)
        for o, indices in enumerate(self.members):
            if not self.present(indices):
                self.seen.forget(o)
                self.windows[o].checked = NO
        value().backward()
        self.last_backward = (name, self.shown[name])
        for index in reached:
            gradient = self.gradients[index]
            gradient.pending, gradient.unscaled, gradient.dropped = True, False, False
            gradient.losses.add(name)
            gradient.origins.add(self.last_backward)
        for o in range(len(self.windows)):
            self._open(o, name, reached)
        for o in sorted(self.known):
            if "unscaled" in self.windows[o].stages:  # a later backward's gradients are unscaled as well
                self.check(o, certain=self.windows[o].stages == {"unscaled"}, met=False)

    def _convert(self, name: str) -> None:
        """Convert gradients that carry another scale before a backward pass adds to them."""
        before = {self.last_backward[0]} if self.last_backward else set()
        for index in self.present(range(len(self.params))):
            gradient, finite = self.gradients[index], self.finite([index])
            if gradient.pending is False:
                gradient.losses.clear()  # their overflows have been counted
            else:
                for other in (gradient.losses | before) - {name}:
                    self.scales.record(other, {False} if finite else {False, True}, certain=False)
                if finite:  # a later overflow does not count for the other scales
                    gradient.losses &= {name}
                for o in self.owners(index) if not finite else ():
                    self.windows[o].noted |= before
            gradient.unscaled = False
            gradient.pending = gradient.pending or None
        for gradient in self.gradients:  # from now on only this backward counts, until the next step
            gradient.used_by.clear()
            gradient.assumed = False

    def _open(self, o: int, name: str, reached: set[int]) -> None:
        window = self.windows[o]
        if reached & set(self.members[o]):
            window.fresh = YES
        elif window.fresh == NO:
            window.fresh = MAYBE
        window.begun.add(name)
        window.explicit = False

    # -- checks ---------------------------------------------------------------------------------

    def meet(self, o: int) -> None:
        self.known[o] = None
        self.joined = {pair for pair in self.joined if pair[0] != o}

    def check(self, o: int, *, write: bool = True, certain: bool = True, met: bool = True) -> set[bool]:
        """Check an optimizer's gradients. Count overflows for the scales, and return the allowed answers to
        "is it skipped?".

        ``write`` means that they are unscaled too. ``certain`` means that this certainly happens. ``met``
        means that the scaler has the optimizer itself, and therefore sees parameters that have joined it.
        """
        if met:
            self.meet(o)
            self._use_again(o)
        self.checked = YES if YES in (self.checked, YES if certain else NO) else MAYBE
        here = self.present(self.members[o])
        for other, members in enumerate(self.members):
            window = self.windows[other]
            if other == o and here:
                window.checked = YES
            elif set(here) & set(members) and window.checked == NO:
                window.checked = MAYBE
        for index in here:
            if not self.finite([index]):
                for other, members in enumerate(self.members):
                    if index in members:
                        self.seen.see(other, index, YES if other == o and certain else MAYBE)
        found = self.seen.skips(o, self.members[o])
        self._record(o, here, found, certain)
        for index in here if write else ():
            gradient, sure = self.gradients[index], certain and (o, index) not in self.joined
            gradient.pending = False if sure else None
            if not gradient.unscaled:
                gradient.used_by.clear()
            gradient.unscaled, gradient.replaced = gradient.unscaled or sure, False
            gradient.assumed = False
        return found

    def _use_again(self, o: int) -> None:
        """Treat gradients that the optimizer used before an update as scaled again, as torch does."""
        for index in self.members[o]:
            gradient = self.gradients[index]
            used_up = o in gradient.used_by and gradient.used_at != self.updates
            if used_up and not gradient.assumed and DEFAULT in self.used:
                gradient.assumed = True
                self.windows[o].begun.add(DEFAULT)
                if self.params[index].grad is not None:
                    self.params[index].grad.div_(self.shown[DEFAULT])
                    gradient.pending, gradient.unscaled, gradient.losses = True, False, {DEFAULT}

    def _record(self, o: int, here: list[int], found: set[bool], certain: bool) -> None:
        """Count the result of a check for the scales that the gradients carry."""
        window = self.windows[o]
        for index in here if certain else ():
            if self.gradients[index].pending:
                window.certain |= self.gradients[index].losses
        if not window.certain | window.begun:
            window.begun |= self.used  # a check of used gradients: it is not specified whether it counts
        for name in window.noted:
            self.scales.record(name, {False, True}, certain=False)
        for name in window.certain | window.begun:
            if certain and here and name in window.certain:
                self.scales.record(name, found, certain=True)
            else:  # this scale may have contributed, with finite gradients
                self.scales.record(name, found | {False}, certain=False)

    def unscale(self, o: int, *, explicit: bool) -> None:
        """Unscale as ``unscale_`` and ``ensure_unscaled`` do if ``explicit``, else as a clip does first."""
        window = self.windows[o]
        self.check(o)
        window.stages = {"stepped", "unscaled"} if window.stages == {"stepped"} else {"unscaled"}
        window.must_step = True
        window.explicit = window.explicit or explicit
        window.fresh = NO if explicit or window.fresh == NO else MAYBE
        for index in self.members[o]:
            self.gradients[index].used_at = self.updates

    def clip_norm(self, indices: Iterable[int], max_norm: float, norm_type: float) -> float:
        """Clip the true gradients and return their norm. If they overflowed, leave them unchanged."""
        norm = self.norm(indices, norm_type)
        if math.isfinite(norm):
            factor = min(1.0, max_norm / (norm + 1e-6))
            for index in self.present(indices):
                self.params[index].grad.mul_(factor)
        return norm

    # -- changes made by the user ---------------------------------------------------------------

    def edit(self, index: int, change: Callable[[torch.Tensor], object], replaced: bool = False) -> None:
        grad, gradient = self.params[index].grad, self.gradients[index]
        change(grad)
        gradient.replaced |= replaced
        if not grad.any():
            self._drop(index)
        else:
            gradient.dropped = False

    def _drop(self, index: int) -> None:
        """A gradient is now zero or None.

        If all gradients of its optimizers are, the batch that it came from is discarded.
        """
        for i in self._beside(index):
            dropped = not any(self.params[other].grad.any() for other in self.present(self._beside(i)))
            if dropped or i == index:
                self.gradients[i].dropped = dropped
                self.seen.doubt(i, dropped=dropped)

    def _beside(self, index: int) -> set[int]:
        """Return the parameters of all its optimizers, including itself."""
        return {i for o in self.owners(index) for i in self.members[o]} | {index}

    def clear(self, indices: Iterable[int], zeroed: bool) -> None:
        """The user sets gradients to zero or to None."""
        for index in self.present(indices):
            if zeroed:
                self.params[index].grad.zero_()
            else:
                self.params[index].grad = None
            self.gradients[index].clear(zeroed)
            self._drop(index)

    def join(self, o: int, index: int) -> None:
        self.seen.join(o, index, self.owners(index))
        self.members[o].append(index)
        self.optimizers[o].add_param_group({"params": [self.params[index]]})
        self.joined.add((o, index))
        window = self.windows[o]
        window.begun |= self.gradients[index].losses
        window.grown |= self.params[index].grad is not None

    # -- steps and updates ----------------------------------------------------------------------

    def step(self, o: int, skipped: bool) -> None:
        if not skipped:
            self.optimizers[o].step()
        self.close(o, skipped)

    def run_closure(self, o: int, closure: Callable[[], torch.Tensor]) -> bool:
        """Step with a closure. If the closure gives up, restore everything. Return whether it gave up."""
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

    def close(self, o: int, skipped: bool) -> None:
        for index in self.members[o]:
            gradient = self.gradients[index]
            gradient.pending = gradient.replaced = gradient.assumed = False
            gradient.unscaled = True
            gradient.used_by.add(o)
            gradient.used_at = self.updates
        self.seen.step(o, self.members[o])
        self.windows[o] = Window(stages={"stepped"}, skipped=self.windows[o].skipped + skipped)

    def update(self, new_scale: float | None) -> None:
        """Do ``update()``, which is a request, or ``update(new_scale)``, which takes effect immediately."""
        self.updates += 1
        self.checked = NO
        for window in self.windows:
            window.stages, window.explicit = {"ready"}, False
            window.checked = MAYBE if window.checked == YES else window.checked
            window.begun |= window.certain
            window.certain = set()
        for gradient in self.gradients:
            # overflows of the other scales have been counted
            gradient.losses &= {self.last_backward and self.last_backward[0]}
        self.seen.update()
        waits = update_waits(self)
        if new_scale is not None:
            self.scales.fill(new_scale, self.used)
        else:
            self.scales.request(waits)
        if new_scale is not None or waits is False:
            self._tell_overflows()

    def _tell_overflows(self) -> None:
        self.seen.tell({index for index, gradient in enumerate(self.gradients) if gradient.dropped})

    def start_anew(self) -> None:
        """Continue with another scaler, which knows no optimizer yet."""
        self.known.clear()
        self.seen.clear()
        self.used.clear()
        self.last_backward = None
        self.windows = [Window() for _ in self.windows]
        self.gradients = [Gradient(pending=None) for _ in self.gradients]
        self.scales.copied()
