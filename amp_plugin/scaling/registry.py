"""The optimizers a scaler knows, and how their parameters fall into gradient groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from operator import is_

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling.gradients import parameter_layouts, params_of
from amp_plugin.scaling.loss_scale import PendingScale
from amp_plugin.scaling.per_optimizer import PerOptimizerState, Shared, StepPastScaler
from amp_plugin.scaling.unscaling import GradientGroup


class Registry:
    """The states of all optimizers a scaler has met, and their gradient groups."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._states: dict[int, PerOptimizerState] = {}
        self._numbers = itertools.count(1)
        self._may_delay_update: list[int] = []
        self._gone: list[bool] = []  # an entry for each optimizer that died since the sets were made
        self.last_backward: PendingScale | None = None  # the loss scale as it was when that began

    def __iter__(self) -> Iterator[PerOptimizerState]:
        """Iterate over the states of the optimizers that still exist."""
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        """Return the number of optimizers."""
        return len(self._states)

    def groups(self) -> list[GradientGroup]:
        """Return all gradient groups, each once."""
        return list(dict.fromkeys(gradients for state in self for gradients in state.groups))

    def find(self, optimizer: Optimizer) -> PerOptimizerState | None:
        """Return the state of an optimizer, or of one it wraps (the same ``param_groups`` object)."""
        state = self._states.get(id(optimizer))
        if state is not None:
            return state
        groups = getattr(optimizer, "param_groups", None)
        return next((state for state in self if state.optimizer.param_groups is groups), None)

    def state(self, optimizer: Optimizer) -> PerOptimizerState:
        """Return an optimizer's state, its parameters looked at again; a new one if it was never met."""
        return self.add([optimizer])[0]

    def add(self, optimizers: Iterable[Optimizer]) -> list[PerOptimizerState]:
        """Return the states of optimizers, new ones for those met for the first time."""
        states = []
        for optimizer in optimizers:
            if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
                given = type(optimizer).__name__
                msg = f"expected an optimizer with param_groups, got {given}; pass the torch.optim one"
                raise TypeError(msg)
            states.append(self.find(optimizer) or self._meet(optimizer))
        self.refresh(states)
        return states

    def _meet(self, optimizer: Optimizer) -> PerOptimizerState:
        key, states, gone = id(optimizer), self._states, self._gone
        reference = weakref.ref(optimizer, lambda _: gone.append(states.pop(key, None) is None))
        state = states[key] = PerOptimizerState(reference, next(self._numbers), self.shared)
        if self.shared.scales.enabled and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            StepPastScaler(state)
        return state

    def refresh(self, states: Iterable[PerOptimizerState]) -> bool:
        """Look at the parameters of optimizers again; returns whether some have joined or left."""
        changed = bool(self._gone)
        self._gone.clear()
        for state in states:
            params, before = params_of(state.optimizer), state.params
            if len(params) != len(before) or not all(map(is_, params, before)):
                state.take_params(list(params), parameter_layouts(params))
                changed = True
        if changed:
            for state in self:
                state.write_clip()  # it is of the parameters that the optimizer had
            self._partition()
            self._may_delay_update = list(self._states)
        return changed

    def refresh_joined(self) -> bool:
        """Look again at the parameters of optimizers that have more or fewer of them than before."""
        return self.refresh([state for state in self if len(params_of(state.optimizer)) != len(state.params)])

    def note_backward(self, reading: PendingScale) -> None:
        """Record that a scaled backward begins: any optimizer may delay the next update after it."""
        self.last_backward = reading
        self._may_delay_update = list(self._states)

    def delays_update(self) -> bool:
        """Whether an optimizer has yet to step; one that has not to is not asked again before a backward."""
        waiting = self._may_delay_update
        while waiting and not ((state := self._states.get(waiting[-1])) and state.delays_update()):
            waiting.pop()
        return bool(waiting)

    def is_step_refused(self, state: PerOptimizerState, *, repeats: bool = False) -> bool:
        """Whether a step lacks new gradients (a closure ``repeats`` it), or an update: all have stepped."""
        if state.stage is not OptState.STEPPED:
            return False
        over = self.shared.scales.default.options.dynamic and all(
            other.stage is OptState.STEPPED for other in self
        )
        return over or not (repeats or state.is_awaited())

    def _partition(self) -> None:
        """Let parameters with the same owners and the same history form one group."""
        before = {
            id(param): (gradients, position)
            for gradients in self.groups()
            for position, param in enumerate(gradients.params)
        }
        owners: dict[Tensor, set[int]] = {}
        for state in self:
            for param in state.params:
                owners.setdefault(param, set()).add(state.number)
        alike: dict[tuple[frozenset[int], GradientGroup | None], list[tuple[Tensor, int]]] = {}
        for param, numbered in owners.items():
            former, position = before.get(id(param), (None, -1))
            alike.setdefault((frozenset(numbered), former), []).append((param, position))
        groups: dict[int, list[GradientGroup]] = {state.number: [] for state in self}
        for (numbers, former), members in alike.items():
            if former is None:
                gradients = self._new_group([param for param, _ in members], numbers)
            elif former.owners == numbers and len(former.params) == len(members):
                gradients = former
            else:
                gradients = former.split([position for _, position in members], numbers)
            for number in numbers:
                groups[number].append(gradients)
        for state in self:
            state.groups = groups[state.number]

    def _new_group(self, params: list[Tensor], owners: frozenset[int]) -> GradientGroup:
        """Return a group of new parameters; gradients they have are taken for the last scaled backward's."""
        if not self.shared.scales.enabled:
            return GradientGroup(params, owners, remembers=False)
        reading = self.last_backward
        if reading is None:  # as torch takes them
            return GradientGroup(params, owners, self.shared.scales.default)
        gradients = GradientGroup(params, owners, reading.loss_scale)
        gradients.assume_taken()
        if gradients.has_gradients():
            gradients.awaited_owners = owners
            change = reading.change()
            if change is not None:
                gradients.multiply_(change)
        return gradients

    def owners(self, params: Iterable[Tensor]) -> list[PerOptimizerState]:
        """Return whose parameters are given, also without gradients here."""
        wanted = {id(param) for param in params}
        self.refresh(self)
        return [state for state in self if not wanted.isdisjoint(map(id, state.params))]
