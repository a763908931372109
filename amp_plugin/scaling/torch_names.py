"""The attributes and methods of torch.amp.GradScaler that other code uses, including private ones.

Lightning, Accelerate and others check ``isinstance(scaler, torch.amp.GradScaler)``, and read or write
``_scale``, ``_device``, ``_lazy_init_scale_growth_tracker`` or ``_per_optimizer_states``. All methods of
torch's class that would change this scaler are overridden. If a program overrides ``_unscale_grads_`` or
``_maybe_opt_step``, its method is called where torch.amp calls it. Writing to ``_per_optimizer_states``
changes the state of this scaler's optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.options import between, whole
from amp_plugin.scaling.core import ScalerCore
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.optimizer_state import OptimizerState


def _of_loss_scale(name: str) -> Any:
    """Return a property that gets and sets an attribute of the default loss scale."""
    return property(attrgetter(f"loss_scale.{name}"), lambda self, new: setattr(self.loss_scale, name, new))


class TorchNames(torch.amp.GradScaler):
    """torch's getters, setters and private attributes, which read and write our loss scales and states."""

    def _take_core(self, core: ScalerCore) -> None:
        """Set the ScalerCore, whose states are exposed under torch's names."""
        self.core, self._records = core, OptimizerRecords(core)

    _enabled = property(
        lambda self: self.core.shared.enabled, lambda self, enabled: self.core.switch(bool(enabled))
    )
    _device = property(
        lambda self: self.core.shared.device,
        lambda self, device: self.core.shared.place(device, self.core.shared.ranks),
    )
    _scale = property(lambda self: self.loss_scale.value, lambda self, value: self.loss_scale.replace(value))
    _growth_tracker = property(
        lambda self: None if self._scale is None else self.loss_scale.growth_tracker,
        lambda self, tracker: setattr(self.loss_scale, "growth_tracker", tracker),
    )
    _growth_factor = _of_loss_scale("growth_factor")
    _backoff_factor = _of_loss_scale("backoff_factor")
    _growth_interval = _of_loss_scale("growth_interval")
    _init_scale = _of_loss_scale("init_scale")
    _init_growth_tracker = property(
        lambda self: int(self.loss_scale.growth_tracker.item()),
        lambda self, steps: self.loss_scale.growth_tracker.fill_(steps),
    )

    @property
    def loss_scale(self) -> LossScale:
        """The default loss scale."""
        return self.core.shared.default

    def is_enabled(self) -> bool:  # torch's method would break the graph of a compiled step
        """Return whether losses are scaled. A disabled scaler still checks gradients and skips steps."""
        return self.core.shared.enabled

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, which must be more than 1."""
        self._dynamic("set_growth_factor").growth_factor = between("growth_factor", new_factor, 1)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, which must be between 0 and 1."""
        self._dynamic("set_backoff_factor").backoff_factor = between("backoff_factor", new_factor, 0, 1)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval.

        If at least ``new_interval`` steps without an overflow have already passed, the scale grows after the
        next step without an overflow.
        """
        self._dynamic("set_growth_interval").growth_interval = whole("growth_interval", new_interval)

    def _dynamic(self, method: str) -> LossScale:
        if not self.loss_scale.options.dynamic:
            msg = f"{method}() needs a dynamic loss scale; this one is constant (dynamic=False)"
            raise TypeError(msg)
        return self.loss_scale

    @property  # type: ignore[override]
    def _per_optimizer_states(self) -> OptimizerRecords:
        return self._records.complete()

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        self._records.replace(records)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self.loss_scale.materialize(dev)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        state = self.core.state(optimizer)
        state.begin_call()
        state.measure(unscale=False)
        return state.found_inf_per_device


_STAGE: Final = "stage"
_FOUND: Final = "found_inf_per_device"


class OptimizerRecords(dict[int, "OptimizerRecord"]):
    """torch's ``_per_optimizer_states``, computed from the OptimizerState objects of the scaler.

    This dict maps the id of an optimizer to a record of its stage and its overflows. Programs can read,
    write, clear and replace this dict. As in torch, ``update()`` lowers the loss scale if a record has an
    overflow, and then clears the dict.
    """

    def __init__(self, core: ScalerCore) -> None:
        super().__init__()
        self._core = core
        # Until the next update, ``_own`` maps an optimizer's id to entries that the program has written.
        # The entries in ``_own`` match no attribute of OptimizerState.
        # ``_own`` is empty if no record was used since the last update.
        # ``_found`` maps an optimizer's id and its stage to overflow flags.
        self._own: dict[int, dict[str, Any]] = {}
        self._found: dict[tuple[int, OptState], dict[Any, Tensor]] = {}
        self._wrapped: dict[int, int] = {}  # maps a wrapper's id to the id of the optimizer that it wraps

    def own(self, key: int) -> dict[str, Any]:
        """Return the entries of a record that match no attribute of OptimizerState."""
        return self._own.setdefault(key, {})

    def state_of(self, key: int) -> OptimizerState | None:
        """Return the OptimizerState of an optimizer; None if the scaler does not know the optimizer."""
        return self._core.find_by_id(self._wrapped.get(key, key))

    def found(self, key: int, state: OptimizerState) -> dict[Any, Tensor]:
        """Return a dict that maps each device to an overflow flag. A program may write to the dict."""
        if state.found_inf_per_device or state.stage is OptState.UNSCALED:
            return state.found_inf_per_device
        result = state.result if state.stage is OptState.STEPPED else None
        found = {} if result is None else {result.found_inf.device: result.found_inf}
        return self._found.setdefault((key, state.stage), found)

    def write_found(self, key: int, state: OptimizerState, found: dict[Any, Tensor]) -> None:
        """Replace an optimizer's overflow flags with a dict that the user's program assigned to them."""
        is_stepped = state.stage is OptState.STEPPED
        state.write_found({} if is_stepped else found)
        self._found[key, state.stage] = found

    def write_stage(self, key: int, state: OptimizerState, stage: OptState) -> None:
        """Set the optimizer's stage to the value that the program assigned.

        Overflow flags are kept until the next unscaling.
        """
        found = self.found(key, state)
        self._found.pop((key, state.stage), None)
        state.write_stage(stage)
        state.write_found(found if stage is OptState.UNSCALED else {})
        self._found[key, stage] = found

    def meet(self, optimizer: Any) -> None:
        """Apply the stage and the overflow flags that a program set before the scaler knew the optimizer."""
        key = id(optimizer)
        written = self._own.get(key, {})
        values = {str(name): written.pop(name) for name in (_FOUND, _STAGE) if name in written}
        state = self._core.state(optimizer) if values else self._core.find(optimizer)
        if state is not None and state.optimizer is not optimizer:
            self._wrapped[key] = id(state.optimizer)
        self[key].update(values)

    def complete(self) -> OptimizerRecords:
        """Add a record for each optimizer whose stage is not READY, and return all records."""
        for state in self._core:
            if state.stage is not OptState.READY and id(state.optimizer) not in self._wrapped.values():
                self[id(state.optimizer)]
        return self

    def settle(self, *, keep: bool) -> None:
        """Pass the overflow flags in the records to the next update, and then clear the records.

        Args:
            keep: True to keep the overflow flags of an earlier update that is still pending.
        """
        if self._own and len(self._core.shared.scales) == 1:
            for state in self._core:
                self[id(state.optimizer)]
            found = [flag for record in self.values() for flag in record[_FOUND].values()]
            self._core.shared.default.replace_checks(found, keep=keep)
            for state in self._core:
                state.forget_overflows()
        self._own, self._found, self._wrapped = {}, {}, {}
        super().clear()

    def replace(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace all records with those that a program has assigned."""
        given = {key: dict(record) for key, record in records.items()}
        for state in self._core:
            self[id(state.optimizer)]
        self.clear()
        self.settle(keep=False)
        for key, record in given.items():
            self[key].update(record)

    def __missing__(self, key: int) -> OptimizerRecord:
        """Return a new record for an optimizer that has no record yet, as torch's defaultdict does."""
        record = OptimizerRecord(self, key)
        super().__setitem__(key, record)
        return record

    def __setitem__(self, key: int, record: Mapping[str, Any]) -> None:
        """Take a record that a program has made."""
        given = dict(record)
        self.pop(key, None)
        self[key].update(given)

    def __delitem__(self, key: int) -> None:
        """Forget the optimizer's overflow flags. Afterwards, the optimizer may unscale and step again."""
        super().__delitem__(key)
        if (state := self.state_of(key)) is not None:
            self.write_stage(key, state, OptState.READY)
            self.write_found(key, state, {})
        self._own[key] = {}

    def pop(self, key: int, *default: Any) -> Any:
        """Delete a record as :meth:`__delitem__` does, and return a copy of it."""
        if key not in self:
            return super().pop(key, *default)
        record = dict(self[key])
        del self[key]
        return record

    def popitem(self) -> tuple[int, Any]:
        """Delete the last record as :meth:`pop` does."""
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Delete all records as :meth:`pop` does."""
        while self:
            self.popitem()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[int, dict[str, Any]]:
        """Copy the records into plain dicts.

        To restore the records later, a program may assign the copy to ``scaler._per_optimizer_states``.
        """
        return {key: copy.deepcopy(dict(record), memo) for key, record in self.items()}


class OptimizerRecord(MutableMapping[str, Any]):
    """An optimizer's entry in ``_per_optimizer_states``, with its stage and its overflow flags by device."""

    def __init__(self, records: OptimizerRecords, key: int) -> None:
        self._records, self._key = records, key

    def __getitem__(self, name: str) -> Any:
        """Return, depending on the key, the stage, the overflow flags, or a value that the program added."""
        own, state = self._records.own(self._key), self._records.state_of(self._key)
        if name == _STAGE:
            return own.get(name, OptState.READY) if state is None else state.stage
        if name == _FOUND:
            return own.setdefault(name, {}) if state is None else self._records.found(self._key, state)
        return own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Store an entry that a program writes."""
        own, state = self._records.own(self._key), self._records.state_of(self._key)
        if state is not None and name == _STAGE:
            self._records.write_stage(self._key, state, value)
        elif state is not None and name == _FOUND:
            self._records.write_found(self._key, state, value)
        else:
            own[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove an entry that the program has added. The stage and the overflow flags cannot be removed."""
        del self._records.own(self._key)[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(dict.fromkeys([_STAGE, _FOUND, *self._records.own(self._key)]))

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Show the entries as torch does."""
        return repr(dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Copy into a dict."""
        return copy.deepcopy(dict(self), memo)
