"""The optimizers a scaler knows, and how their parameters fall into gradient groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from operator import is_

from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.scaling.gradient_group import GradientGroup
from amp_plugin.scaling.gradients import parameter_layouts
from amp_plugin.scaling.loss_scale import PendingScale
from amp_plugin.scaling.parameter_names import params_of
from amp_plugin.scaling.per_optimizer import PerOptimizerState, Shared


class Registry:
    """The states of all optimizers a scaler has met, and their gradient groups.

    Attributes:
        last_backward: The loss scale of the last scaled backward, as it was when that began; None before the
            first.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._states: dict[int, PerOptimizerState] = {}
        self._numbers = itertools.count(1)
        self._may_delay_update: list[int] = []
        self._gone: list[PerOptimizerState | None] = []  # whose optimizers died since the sets were made
        self.last_backward: PendingScale | None = None

    def __iter__(self) -> Iterator[PerOptimizerState]:
        """Iterate over the states of the optimizers that still exist."""
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        """Return the number of optimizers."""
        return len(self._states)

    def groups(self) -> list[GradientGroup]:
        """Return all gradient groups, each once."""
        states = list(self._states.values())
        if len(states) == 1:
            return states[0].groups
        return list({id(gradients): gradients for state in states for gradients in state.groups}.values())

    def by_id(self, key: int) -> PerOptimizerState | None:
        """Return the state of the optimizer with this id."""
        return self._states.get(key)

    def find(self, optimizer: Optimizer) -> PerOptimizerState | None:
        """Return the state of an optimizer, or of one it wraps (the same ``param_groups`` object)."""
        state = self._states.get(id(optimizer))
        if state is not None:
            return state
        groups = getattr(optimizer, "param_groups", None)
        return next((state for state in self if state.optimizer.param_groups is groups), None)

    def state(self, optimizer: Optimizer) -> PerOptimizerState:
        """Return an optimizer's state, its parameters looked at again; a new one if it was never met."""
        state = self.find(optimizer)
        if state is None:
            return self.add([optimizer])[0]
        self.refresh([state])
        return state

    def add(self, optimizers: Iterable[Optimizer]) -> list[PerOptimizerState]:
        """Return the states of optimizers, new ones for those met for the first time."""
        found = []
        for optimizer in optimizers:
            if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
                given = type(optimizer).__name__
                msg = f"expected an optimizer with param_groups, got {given}; pass the torch.optim one"
                raise TypeError(msg)
            found.append(self.find(optimizer) or self._new_state(optimizer))
        self.refresh(found)
        return found

    def _new_state(self, optimizer: Optimizer) -> PerOptimizerState:
        key, states = id(optimizer), self._states
        gone = self._gone
        reference = weakref.ref(optimizer, lambda _: gone.append(states.pop(key, None)))
        state = states[key] = PerOptimizerState(reference, next(self._numbers), self._shared)
        return state

    def refresh(self, states: Iterable[PerOptimizerState]) -> bool:
        """Look at the parameters of optimizers again; returns whether some have joined or left."""
        changed = bool(self._gone)
        if changed:
            self._gone.clear()
        for state in states:
            params, known = params_of(state.optimizer), state.params
            if len(params) != len(known) or not all(map(is_, params, known)):
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
        joined = [state for state in self if state.has_other_count()]
        return self.refresh(joined) if joined or self._gone else False

    def note_backward(self, reading: PendingScale) -> None:
        """Note that a scaled backward begins: any optimizer may delay the next update after it."""
        self.last_backward = reading
        self._may_delay_update = list(self._states)

    def delays_update(self) -> bool:
        """Whether the loss scale cannot change yet, because an optimizer has yet to step.

        One that does not delay it is not asked again before the next backward, so that an ``update()``
        after each of many optimizers stays cheap.
        """
        while self._may_delay_update:
            state = self._states.get(self._may_delay_update[-1])
            if state is not None and state.delays_update():
                return True
            self._may_delay_update.pop()
        return False

    def _partition(self) -> None:
        """Let parameters with the same owners and the same history form one set."""
        before = {
            id(param): (gradients, position)
            for gradients in self.groups()
            for position, param in enumerate(gradients.params)
        }
        owners: dict[int, set[int]] = {}
        params: dict[int, Tensor] = {}
        for state in self:
            for param in state.params:
                owners.setdefault(id(param), set()).add(state.number)
                params[id(param)] = param
        classes: dict[tuple[frozenset[int], GradientGroup | None], list[Tensor]] = {}
        for key, param in params.items():
            former = before[key][0] if key in before else None
            classes.setdefault((frozenset(owners[key]), former), []).append(param)
        sets: dict[int, list[GradientGroup]] = {state.number: [] for state in self}
        for (numbers, former), members in classes.items():
            positions = [before[id(param)][1] for param in members] if former else []
            gradients = self._set_of(members, numbers, former, positions)
            for number in numbers:
                sets[number].append(gradients)
        for state in self:
            state.take_groups(sets[state.number])

    def _set_of(
        self, params: list[Tensor], owners: frozenset[int], former: GradientGroup | None, positions: list[int]
    ) -> GradientGroup:
        if former is None:
            return self._new_set(params, owners)
        if former.owners == owners and len(former.params) == len(params):
            return former
        return former.split(positions, owners)

    def _new_set(self, params: list[Tensor], owners: frozenset[int]) -> GradientGroup:
        """A set of parameters met for the first time.

        Gradients that they already have are taken to come from the last scaled backward; if there was none,
        to carry the default scale, as torch does.
        """
        if not self._shared.scales.enabled:
            return GradientGroup(params, owners, remembers=False)
        reading = self.last_backward
        if reading is None:
            return GradientGroup(params, owners, self._shared.scales.default)
        gradients = GradientGroup(params, owners, reading.loss_scale)
        gradients.taken_away.assume_reached()
        if gradients.has_gradients():
            gradients.awaited_owners = owners
            change = reading.change()
            if change is not None:
                gradients.multiply_(change)
        return gradients

    def optimizers_of_exactly(self, params: Iterable[Tensor]) -> list[Optimizer]:
        """Return the optimizers that step these parameters and no others."""
        wanted = {id(param) for param in params}
        return [state.optimizer for state in self if {id(p) for p in params_of(state.optimizer)} == wanted]

    def states_of(self, params: Iterable[Tensor]) -> tuple[list[PerOptimizerState], int]:
        """Return the states of the optimizers that step the given parameters.

        Also of those without gradients here: other ranks may have some, and wait for this one.
        """
        params = list(params)
        wanted = {id(param) for param in params}
        unknown = {id(param) for param in params if param.grad is not None}
        states = list(self)
        self.refresh(states)
        found = []
        for state in states:
            own = {id(param) for param in state.params}
            if own & wanted:
                found.append(state)
            unknown -= own
        return found, len(unknown)
