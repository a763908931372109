"""ScalerCore holds the optimizers that a scaler knows, and the methods that only adapters call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_plugin.quiet_hooks import register_quiet_hook
from amp_plugin.scaling.gradients import multiply_, params_of
from amp_plugin.scaling.loss_scale import Change, LossScale
from amp_plugin.scaling.optimizer_state import OptimizerState
from amp_plugin.scaling.ranks import Ranks
from amp_plugin.scaling.shared import Shared
from amp_plugin.scaling.step_log import StepLog, StepResult, reference_to

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_guards: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""The hook of the newest scaler, for each optimizer."""


class ScalerCore:
    """The part of :class:`amp_plugin.GradScaler` that only adapters and the package itself use.

    Args:
        shared: The state that all optimizers of the scaler share.
        log: The log of its steps.

    Attributes:
        shared: As given.
        log: As given.
        last_scale: The loss scale of the last scaled backward pass; None before the first scaled backward
            pass.
        last_task: Autograd's number of that backward pass.
    """

    def __init__(self, shared: Shared, log: StepLog) -> None:
        self.shared, self.log = shared, log
        self._states: dict[int, OptimizerState] = {}
        # Ids of optimizers that may delay an update. To be fast, update() checks only these optimizers.
        self._may_delay_update: list[int] = []
        self.last_scale: LossScale | None = None
        self.last_task = -1
        # Returns the factor by which ``last_scale`` has changed since the last scaled backward pass began.
        self._change: Change = lambda: None

    def __iter__(self) -> Iterator[OptimizerState]:
        """Iterate over the states of the optimizers that still exist."""
        return iter(list(self._states.values()))

    def find(self, optimizer: Optimizer) -> OptimizerState | None:
        """Return the state of an optimizer, or of the inner optimizer that it wraps.

        A wrapper and its inner optimizer have the same ``param_groups`` object.
        """
        state = self._states.get(id(optimizer))
        if state is not None:
            return state
        groups = getattr(optimizer, "param_groups", None)
        return next((state for state in self if state.optimizer.param_groups is groups), None)

    def find_by_id(self, key: int) -> OptimizerState | None:
        """Return the state of the optimizer that has this id."""
        return self._states.get(key)

    def state(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of an optimizer, with its current parameters.

        An unknown optimizer gets a new state.
        """
        return self.add([optimizer])[0]

    def add(self, optimizers: Iterable[Optimizer]) -> list[OptimizerState]:
        """Return the states of optimizers. An unknown optimizer gets a new state."""
        states = []
        for optimizer in optimizers:
            if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
                given = type(optimizer).__name__
                msg = f"expected an optimizer with param_groups, got {given}; pass the torch.optim one"
                raise TypeError(msg)
            states.append(self.find(optimizer) or self._meet(optimizer))
        self.refresh(states)
        return states

    def _meet(self, optimizer: Optimizer) -> OptimizerState:
        key, states = id(optimizer), self._states
        reference = reference_to(optimizer, lambda _: states.pop(key, None))
        state = states[key] = OptimizerState(reference, self.shared)
        for stepping in _stepping(optimizer) if self.shared.enabled else ():
            _guard_steps(state, stepping)
        return state

    def refresh(self, states: Iterable[OptimizerState]) -> bool:
        """Read the parameters of optimizers again; return True if some were added or removed."""
        changed = False
        for state in states:
            params, before = params_of(state.optimizer), state.params
            if len(params) != len(before) or not all(map(is_, params, before)):
                self._take_params(state, list(params))
                self._may_delay_update = list(self._states)
                changed = True
        for state in self if changed else ():
            state.share(list(self))
        return changed

    def refresh_joined(self) -> bool:
        """If optimizers have gained or lost parameters, read their parameters again and return True."""
        return self.refresh([state for state in self if len(params_of(state.optimizer)) != len(state.params)])

    def _take_params(self, state: OptimizerState, params: list[Tensor]) -> None:
        """Set the parameters of an optimizer.

        Gradients of new parameters are assumed to come from the last backward pass.
        """
        others = list(self)
        known = {id(param) for other in others for param in other.params}
        state.take_params(params, others, self.last_scale)
        change = None if self.last_scale is None else self._change()
        if change is not None:
            strangers = [param for param in params if id(param) not in known]
            state.ledger.write(lambda: multiply_(strangers, change))

    def note_loss(self, loss: Any) -> None:
        """Pass a loss, before it is scaled, to the functions that subscribed to losses."""
        self.shared.spikes.hear(loss)
        self.log.note_loss(loss)

    def note_backward(self, scale: LossScale, task: int) -> None:
        """Record the start of a scaled backward pass. Then each optimizer can delay the next scale update."""
        self.last_scale, self.last_task, self._change = scale, task, scale.change_from_now_on()
        self._may_delay_update = list(self._states)

    def delays_update(self) -> bool:
        """Return whether any optimizer still has to step before the scale may change.

        An optimizer that does not need to step is not checked again until the next backward pass.
        """
        waiting, is_alone = self._may_delay_update, len(self._states) == 1
        while waiting and not (
            (state := self._states.get(waiting[-1])) and state.delays_update(is_alone=is_alone)
        ):
            waiting.pop()
        return bool(waiting)

    def is_step_refused(self, state: OptimizerState, *, repeats: bool = False) -> bool:
        """Return whether a step must be refused.

        A second step is refused if there are no new gradients, unless a closure computes them (``repeats``).
        With a dynamic loss scale, once all optimizers have stepped, every further step is refused until
        ``update()`` has been called.
        """
        if state.stage is not OptState.STEPPED:
            return False
        is_over = self.shared.options.dynamic and all(other.stage is OptState.STEPPED for other in self)
        return is_over or not (repeats or state.is_awaited)

    def owners(self, params: Iterable[Tensor]) -> list[OptimizerState]:
        """Return the states of optimizers that have at least one of these parameters."""
        wanted = {id(param) for param in params}
        self.refresh(self)
        return [state for state in self if not wanted.isdisjoint(map(id, state.params))]

    # For adapters.

    def place(
        self,
        device: str,
        *,
        process_groups: Sequence[ProcessGroup] = (),
        sharded_groups: Sequence[ProcessGroup] = (),
    ) -> None:
        """Set the device and the ranks of the scaler, once they are known.

        If the process groups change, the scaler forgets its optimizers. The scale and the counts stay.

        Args:
            device: The device type.
            process_groups: Process groups whose ranks must all take a step or all skip it.
            sharded_groups: Process groups whose ranks hold different shards of the gradients. Norms are
                combined over these groups.
        """
        ranks = self.shared.ranks
        if not ranks.are_of(process_groups, sharded_groups):
            ranks = Ranks(process_groups, sharded_groups)
            self.log.start_over(self.log.skipped_steps())
            self._states.clear()
            self._may_delay_update, self.last_scale = [], None
        self.shared.place(str(device), ranks)

    def switch(self, enabled: bool) -> None:
        """Switch loss scaling on or off, as some programs do by setting torch's attribute ``_enabled``."""
        if enabled is self.shared.enabled:
            return
        self.shared.enable(enabled)
        for state in self:
            state.switch(enabled)
            for stepping in _stepping(state.optimizer) if enabled else ():
                _guard_steps(state, stepping)

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Unscale gradients if they are scaled. Unlike ``unscale_``, this method may be called repeatedly."""
        if self.shared.enabled:
            self.shared.require_scale("ensure_unscaled", optimizer)
            self.state(optimizer).unscale_()

    @property
    def has_scaled(self) -> bool:
        """Whether a loss scale has been initialized.

        A loss scale is initialized when the first loss is multiplied by it. Under Lightning and Accelerate,
        an optimizer step initializes the default loss scale if no loss has been scaled yet.
        """
        return self.shared.enabled and bool(self.shared.used_scales())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that the scaler knows."""
        return [state.optimizer for state in self]

    def optimizers_of(self, params: Iterable[Tensor]) -> list[Optimizer]:
        """Return the known optimizers that have exactly these parameters."""
        params = list(params)
        wanted = set(map(id, params))
        return [s.optimizer for s in self.owners(params) if wanted == set(map(id, s.params))]

    def result_of(self, optimizer: Optimizer) -> StepResult | None:
        """Return the result of an optimizer's last step; None if it has not stepped."""
        state = self.find(optimizer)
        return None if state is None else state.result

    def measure(self, optimizer: Optimizer, norm: Tensor | None = None) -> Tensor | None:
        """Measure unscaled gradients for the optimizer's next StepResult, in one read without a host sync.

        If gradients were measured before a clip, the norm from before the clip is kept.

        Args:
            optimizer: The optimizer. Norms of DTensors are combined over their device mesh, and norms of
                other gradients over ``sharded_groups``.
            norm: The norm (0-dim), if the caller knows it already. Then no gradient is read.

        Returns:
            The norm (float32, 0-dim); None if there are no gradients.
        """
        state = self.state(optimizer)
        if norm is not None:
            state.replace_norm(norm)
            return norm
        state.forget_stale_norm()
        if state.norm is None:
            state.begin_call()
            state.measure(unscale=False)
        return state.norm

    def note_step(
        self,
        optimizer: Optimizer,
        how: str = "the optimizer's own step, without the scaler",
        *,
        result: StepResult | None = None,
    ) -> StepResult:
        """Record a step that was taken without this scaler, and return its result.

        You may call ``update()`` after this method, but you need not.

        Args:
            optimizer: The optimizer that stepped.
            how: A description of how the step was taken.
            result: The result of the step. The default result says that no gradient was checked.
        """
        if not is_optimizer(optimizer):
            return StepResult(how=how)
        state = self.state(optimizer)
        result = state.end_with(result or StepResult(norm=state.norm, how=how))
        if self.shared.enabled:
            state.write_stage(OptState.READY)  # an update need not follow
            self.shared.note_check()
        self.log.add(state.optimizer, result)
        return result


def is_optimizer(given: object) -> bool:
    """Return whether an object has ``param_groups``, which mocks and the optimizers of some engines lack."""
    return isinstance(getattr(given, "param_groups", None), list | tuple)


def _stepping(optimizer: Any) -> list[Any]:
    """Return the optimizer and its inner optimizers (as in SAM), leaving out those without step hooks."""
    hooks = ("_optimizer_step_pre_hooks", "register_step_pre_hook")
    held = [own for own in getattr(optimizer, "__dict__", {}).values() if isinstance(own, Optimizer)]
    return [one for one in (optimizer, *held) if all(hasattr(one, name) for name in hooks)]


def _guard_steps(state: OptimizerState, optimizer: Optimizer) -> None:
    """Register a step hook that raises if ``optimizer.step()`` is called with scaled gradients."""
    known = weakref.ref(state)

    def refuse(*_: Any) -> None:
        if (state := known()) is not None:
            state.refuse_step_past_scaler()

    if optimizer in _guards:
        _guards[optimizer].remove()
    _guards[optimizer] = handle = register_quiet_hook(optimizer, refuse)
    weakref.finalize(state, handle.remove)
