"""The optimizers a scaler knows, and how their parameters fall into gradient sets."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from operator import is_

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.loss_scale import ScaleReading
from amp_plugin.scaling.optimizer_window import OptimizerWindow
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.shard_layout import parameter_layouts
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.units import ScaledBy


class Registry:
    """The windows of all optimizers a scaler has met, and their gradient sets.

    Attributes:
        last_backward: The loss scale of the last scaled backward, as it was when that began; None before the
            first.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._windows: dict[int, OptimizerWindow] = {}
        self._numbers = itertools.count(1)
        self._may_delay_update: list[int] = []
        self._gone: list[OptimizerWindow | None] = []  # whose optimizers died since the sets were made
        self.last_backward: ScaleReading | None = None

    def __iter__(self) -> Iterator[OptimizerWindow]:
        """Iterate over the windows of the optimizers that still exist."""
        return iter(list(self._windows.values()))

    def __len__(self) -> int:
        """Return the number of optimizers."""
        return len(self._windows)

    def sets(self) -> list[GradientSet]:
        """Return all gradient sets, each once."""
        windows = list(self._windows.values())
        if len(windows) == 1:
            return windows[0].sets
        return list({id(gradients): gradients for window in windows for gradients in window.sets}.values())

    def by_id(self, key: int) -> OptimizerWindow | None:
        """Return the window of the optimizer with this id."""
        return self._windows.get(key)

    def find(self, optimizer: Optimizer) -> OptimizerWindow | None:
        """Return the window of an optimizer, or of one it wraps (the same ``param_groups`` object)."""
        window = self._windows.get(id(optimizer))
        if window is not None:
            return window
        groups = getattr(optimizer, "param_groups", None)
        return next((window for window in self if window.optimizer.param_groups is groups), None)

    def window(self, optimizer: Optimizer) -> OptimizerWindow:
        """Return an optimizer's window, its parameters looked at again; a new one if it was never met.

        Raises:
            TypeError: It is no optimizer.
        """
        window = self.find(optimizer)
        if window is None:
            return self.add([optimizer])[0]
        self.refresh([window])
        return window

    def add(self, optimizers: Iterable[Optimizer]) -> list[OptimizerWindow]:
        """Return the windows of optimizers, new ones for those met for the first time.

        Raises:
            TypeError: Something is no optimizer.
        """
        found = []
        for optimizer in optimizers:
            if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
                given = type(optimizer).__name__
                msg = f"expected an optimizer with param_groups, got {given}; pass the torch.optim one"
                raise TypeError(msg)
            found.append(self.find(optimizer) or self._new_window(optimizer))
        self.refresh(found)
        return found

    def _new_window(self, optimizer: Optimizer) -> OptimizerWindow:
        key, windows = id(optimizer), self._windows
        gone = self._gone
        reference = weakref.ref(optimizer, lambda _: gone.append(windows.pop(key, None)))
        window = windows[key] = OptimizerWindow(reference, next(self._numbers), self._shared)
        return window

    def refresh(self, windows: Iterable[OptimizerWindow]) -> bool:
        """Look at the parameters of optimizers again; returns whether some have joined or left."""
        changed = bool(self._gone)
        if changed:
            self._gone.clear()
        for window in windows:
            params, known = params_of(window.optimizer), window.params
            if len(params) != len(known) or not all(map(is_, params, known)):
                window.take_params(list(params), parameter_layouts(params))
                changed = True
        if changed:
            for window in self:
                window.write_clip()  # it is of the parameters that the optimizer had
            self._partition()
            self._may_delay_update = list(self._windows)
        return changed

    def refresh_joined(self) -> bool:
        """Look again at the parameters of optimizers that have more or fewer of them than before."""
        joined = [window for window in self if window.has_other_count()]
        return self.refresh(joined) if joined or self._gone else False

    def note_backward(self, reading: ScaleReading) -> None:
        """Note that a scaled backward begins: any optimizer may delay the next update after it."""
        self.last_backward = reading
        self._may_delay_update = list(self._windows)

    def delays_update(self) -> bool:
        """Whether the loss scale cannot change yet, because an optimizer has yet to step.

        One that does not delay it is not asked again before the next backward, so that an ``update()``
        after each of many optimizers stays cheap.
        """
        while self._may_delay_update:
            window = self._windows.get(self._may_delay_update[-1])
            if window is not None and window.delays_update():
                return True
            self._may_delay_update.pop()
        return False

    def _partition(self) -> None:
        """Let parameters with the same owners and the same history form one set."""
        before = {
            id(param): (gradients, position)
            for gradients in self.sets()
            for position, param in enumerate(gradients.params)
        }
        owners: dict[int, set[int]] = {}
        params: dict[int, Tensor] = {}
        for window in self:
            for param in window.params:
                owners.setdefault(id(param), set()).add(window.number)
                params[id(param)] = param
        classes: dict[tuple[frozenset[int], GradientSet | None], list[Tensor]] = {}
        for key, param in params.items():
            former = before[key][0] if key in before else None
            classes.setdefault((frozenset(owners[key]), former), []).append(param)
        sets: dict[int, list[GradientSet]] = {window.number: [] for window in self}
        for (numbers, former), members in classes.items():
            positions = [before[id(param)][1] for param in members] if former else []
            gradients = self._set_of(members, numbers, former, positions)
            for number in numbers:
                sets[number].append(gradients)
        for window in self:
            window.take_sets(sets[window.number])

    def _set_of(
        self, params: list[Tensor], owners: frozenset[int], former: GradientSet | None, positions: list[int]
    ) -> GradientSet:
        if former is None:
            return self._new_set(params, owners)
        if former.owners == owners and len(former.params) == len(params):
            return former
        return former.split(positions, owners)

    def _new_set(self, params: list[Tensor], owners: frozenset[int]) -> GradientSet:
        """A set of parameters met for the first time.

        Gradients that they already have are taken to come from the last scaled backward; if there was none,
        to carry the default scale, as torch does.
        """
        reading = self.last_backward
        if reading is None:
            return GradientSet(params, owners, ScaledBy(self._shared.scales.default))
        gradients = GradientSet(params, owners, ScaledBy(reading.loss_scale))
        gradients.taken_away.assume_reached()
        if gradients.has_gradients():
            gradients.awaited_owners = owners
            change = reading.change()
            if change is not None:
                gradients.rescale_(change)
        return gradients

    def optimizers_of_exactly(self, params: Iterable[Tensor]) -> list[Optimizer]:
        """Return the optimizers that step these parameters and no others."""
        wanted = {id(param) for param in params}
        return [window.optimizer for window in self if {id(p) for p in params_of(window.optimizer)} == wanted]

    def windows_of(self, params: Iterable[Tensor]) -> tuple[list[OptimizerWindow], int]:
        """Return the windows of the optimizers that step the given parameters.

        Also of those without gradients here: other ranks may have some, and wait for this one.

        Returns:
            The windows, and how many of the parameters have a gradient and no optimizer known here.
        """
        params = list(params)
        wanted = {id(param) for param in params}
        unknown = {id(param) for param in params if param.grad is not None}
        windows = list(self)
        self.refresh(windows)
        found = []
        for window in windows:
            own = {id(param) for param in window.params}
            if own & wanted:
                found.append(window)
            unknown -= own
        return found, len(unknown)
