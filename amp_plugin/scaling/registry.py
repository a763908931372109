"""The optimizers a scaler knows, and how their parameters fall into gradient sets."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.spread import Spread, parameter_spreads
from amp_plugin.scaling.step_result import StepResult

if TYPE_CHECKING:
    from amp_plugin.scaling.folding import FoldedClip


class OptimizerRecord:
    """What a scaler knows of one optimizer since its last step.

    Attributes:
        slot: Its number, the key of its marks in the ledgers.
        names: The names given to parameters, also to those that may join it later.
        params: Its parameters, in the order of its groups.
        sets: The gradient sets they fall into.
        spreads: The ways in which its parameters are spread over ranks.
        stage: What torch's scaler would say: READY, UNSCALED or STEPPED.
        norm: Norm of the unscaled gradients, before clipping; None if not measured yet.
        losses: The loss scales its gradients were multiplied by.
        clip: A clip left to the kernel of a fused optimizer; None if there is none.
        result: The last step's; None before the first.
        skipped: Steps skipped so far, float32, 0-dim, on the device; None before the first step.
        unanswered: Steps since the last ``update()``.
        takes_scaler: Whether ``step`` has a ``grad_scaler`` parameter; None if not looked up yet.
        momentum_started: Whether the momentum buffers of a fused SGD exist.
        found_inf_per_device: As torch's scaler keeps it.
    """

    def __init__(self, optimizer: Optimizer, slot: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.slot = slot
        self.names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self.params: list[Tensor] = []
        self.sets: list[GradientSet] = []
        self.spreads: tuple[Spread, ...] = ()
        self.stage = OptState.READY
        self.result: StepResult | None = None
        self.skipped: Tensor | None = None
        self.unanswered = 0
        self.takes_scaler: bool | None = None
        self.momentum_started = False
        self.forget_window()

    def forget_window(self) -> None:
        """Start a new window: nothing is measured, nothing is to be clipped."""
        self.norm: Tensor | None = None
        self.losses: list[LossScale] = []
        self.clip: FoldedClip | None = None
        self.found_inf_per_device: dict[Any, Tensor] = {}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            msg = "the optimizer of this record no longer exists"
            raise ReferenceError(msg)
        return optimizer

    @property
    def shared(self) -> bool:
        """Whether another optimizer steps some of the parameters too."""
        return any(len(one.owners) > 1 for one in self.sets)

    def all_names(self, params: list[Tensor] | None = None) -> list[str]:
        """Return the name of each parameter, now or then: registered, else by group and index."""
        params = self.params if params is None else params
        optimizer = self._optimizer()
        known = [] if optimizer is None else default_names(optimizer)
        rest = [*known, *(f"parameter {i}" for i in range(len(known), len(params)))]
        return [self.names.get(param, name) for param, name in zip(params, rest, strict=False)]

    def name_of(self, param: Tensor) -> str:
        """Return the name of one of the parameters."""
        return self.all_names()[next(i for i, p in enumerate(self.params) if p is param)]

    def __getitem__(self, key: str) -> Any:
        """Read as torch's per-optimizer dict: ``"stage"`` or ``"found_inf_per_device"``."""
        if key in {"stage", "found_inf_per_device"}:
            return getattr(self, key)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Write as torch's per-optimizer dict."""
        self[key]
        setattr(self, key, value)


class Registry:
    """The records of all optimizers a scaler has met, and their gradient sets.

    Args:
        default: The unit assumed for the gradients of an optimizer met for the first time.
    """

    def __init__(self, default: LossScale) -> None:
        self._default = default
        self._records: dict[int, OptimizerRecord] = {}
        self._slots = itertools.count(1)

    def __iter__(self) -> Iterator[OptimizerRecord]:
        """Iterate over the records of the optimizers that still exist."""
        return iter(list(self._records.values()))

    def __len__(self) -> int:
        """Return the number of optimizers."""
        return len(self._records)

    def sets(self) -> list[GradientSet]:
        """Return all gradient sets, each once."""
        found = {id(one): one for record in self for one in record.sets}
        return list(found.values())

    def by_id(self, key: int) -> OptimizerRecord | None:
        """Return the record of the optimizer with this id."""
        return self._records.get(key)

    def find(self, optimizer: Optimizer) -> OptimizerRecord | None:
        """Return the record of an optimizer, or of one it wraps (the same ``param_groups`` object)."""
        record = self._records.get(id(optimizer))
        if record is not None:
            return record
        groups = getattr(optimizer, "param_groups", None)
        return next((one for one in self if one.optimizer.param_groups is groups), None)

    def add(self, optimizer: Optimizer) -> OptimizerRecord:
        """Make a record of an optimizer met for the first time."""
        record = OptimizerRecord(optimizer, next(self._slots))
        key, records = id(optimizer), self._records
        record._optimizer = weakref.ref(optimizer, lambda _: records.pop(key, None))
        records[key] = record
        self.refresh(record)
        return record

    def refresh(self, record: OptimizerRecord) -> bool:
        """Look at the optimizer's parameters again; True if they are others than before."""
        groups = record.optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        known = record.params
        if len(params) == len(known) and all(map(is_, params, known)):
            return False
        record.params = list(params)
        record.momentum_started = False
        record.spreads = parameter_spreads(params)
        self._partition()
        return True

    def _partition(self) -> None:
        """Let parameters with the same owners and the same history form one set."""
        before = {id(param): one for one in self.sets() for param in one.params}
        owners: dict[int, set[int]] = {}
        for record in self:
            for param in record.params:
                owners.setdefault(id(param), set()).add(record.slot)
        classes: dict[tuple[frozenset[int], int], list[Tensor]] = {}
        for param in _unique(param for record in self for param in record.params):
            key = (frozenset(owners[id(param)]), id(before.get(id(param))))
            classes.setdefault(key, []).append(param)
        sets = [self._set_of(params, key[0], before.get(id(params[0]))) for key, params in classes.items()]
        for record in self:
            record.sets = [one for one in sets if record.slot in one.owners]

    def _set_of(
        self, params: list[Tensor], owners: frozenset[int], before: GradientSet | None
    ) -> GradientSet:
        if before is None:
            fresh = GradientSet(params, owners)
            fresh.unit = self._default
            return fresh
        if before.owners == owners and len(before.params) == len(params):
            return before
        return before.split(params, owners)


def _unique(params: Iterable[Tensor]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for param in params:
        if id(param) not in seen:
            seen.add(id(param))
            yield param


def default_names(optimizer: Optimizer) -> list[str]:
    """Name parameters by what the optimizer knows: their names, else group and index."""
    names: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        label = group.get("name", f"group {number}")
        names += given or [f"{label}[{i}]" for i in range(len(group["params"]))]
    return names
