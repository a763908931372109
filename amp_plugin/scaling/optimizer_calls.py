"""What a scaler does with an optimizer: register, unscale, clip, step, report."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.scaling import clipping, closures, stepping
from amp_plugin.scaling.distributed import Groups, combine
from amp_plugin.scaling.gradient_set import GradientSet
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.scaling.registry import OptimizerRecord
from amp_plugin.scaling.spread import parameter_spreads
from amp_plugin.scaling.step_result import HostFlag, StepResult
from amp_plugin.scaling.torch_interface import TorchInterface


class OptimizerCalls(TorchInterface):
    """The methods of :class:`GradScaler` that take an optimizer."""

    _groups: Groups
    _core_agreed: bool
    _fp16_gradients: bool
    _sync_free: bool
    _requested: bool
    _floor: list[HostFlag]
    _open_results: weakref.WeakKeyDictionary[StepResult, LossScale]
    _last_backward: tuple[LossScale, int, Tensor] | None
    _backward: int
    _skipped: Tensor | None
    _passed: weakref.WeakKeyDictionary[Optimizer, StepResult]
    _norms: weakref.WeakKeyDictionary[Optimizer, Tensor]
    _skipped_before: int = 0

    # What adapters ask, enabled or not.

    @property
    def has_scaled(self) -> bool:
        """Whether a loss has been scaled yet."""
        return self._enabled and self._first_materialized() is not None

    def current_scale(self) -> Tensor | None:
        """Return the scale on its device, float32, 0-dim, without a host sync; None before the first loss."""
        return self._loss_scale.value if self._enabled else None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers it knows."""
        return [record.optimizer for record in self._registry]

    def parameter_names(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in the order of its groups."""
        return self._record(optimizer).all_names()

    def has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Whether there are other gradients than those last unscaled or stepped."""
        record = self._record(optimizer)
        return any(gradients.renewed(record.slot) for gradients in record.sets)

    def overflowed_before_closure(self, optimizer: Optimizer) -> bool:
        """Unscale what earlier micro-batches have left, and say whether it is not finite: a host sync."""
        record = self._record(optimizer)
        pending = any(gradients.touched and gradients.ledger.count() for gradients in record.sets)
        return pending and bool(self._unscale(record)[1].item() > 0)

    def measure(self, optimizer: Optimizer) -> Tensor | None:
        """Measure the norm of gradients that carry no scale, for the optimizer's next result."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        spreads = parameter_spreads(params)
        parts = GradientSet(params, frozenset()).measure(2.0)
        if not (parts or spreads or self._groups):
            return None
        device = parts[0].norm.device if parts else params[0].device
        norm = combine(parts, 2.0, device, self._groups, spreads)[0]
        self.note_norm(optimizer, norm)
        return norm

    def note_norm(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Keep a norm that is known already (0-dim) for the optimizer's next result."""
        self._norms[optimizer] = norm

    def note_step(self, optimizer: Optimizer) -> StepResult:
        """Note a step taken without :meth:`step`, and return what there is to tell of it."""
        result = self._passed[optimizer] = StepResult.unscaled(self._norms.pop(optimizer, None))
        return result

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        record = self._record(optimizer)
        stepping.check(self, record, write=False)
        return record.found_inf_per_device

    def register(self, *optimizers: Optimizer, names: Any = None) -> None:
        """Make optimizers known before their first step.

        A plain loop with one optimizer need not; with several, ``update()`` can only wait for the
        gradients of those it knows.

        Args:
            *optimizers: The optimizers.
            names: Their parameters' names for :meth:`last_step`'s ``overflow_report()``: a module, the
                pairs of ``module.named_parameters()``, or a mapping of names to parameters.

        Raises:
            TypeError: Something is no optimizer, or ``names`` none of these.
            ValueError: ``names`` names parameters, but none of an optimizer's.
        """
        if not self._enabled:
            for optimizer in optimizers:
                self._registry.find(optimizer) or self._registry.add(optimizer)
            return
        named = _named(names)
        own = {id(param) for param in named.values()}
        for optimizer in optimizers:
            record = self._record(optimizer)
            if named:
                if record.params and not any(id(p) in own for p in record.params):
                    msg = (
                        f"register(names=...): none of the {len(named)} names is of a parameter of this "
                        f"{type(optimizer).__name__}; give the module that it optimizes"
                    )
                    raise ValueError(msg)
                record.names.update((param, name) for name, param in named.items())

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        record = self._registry.find(optimizer)
        if record is not None:
            self._registry.refresh(record)
            return record
        if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
            given = type(optimizer).__name__
            msg = f"expected an optimizer with param_groups, got {given}; pass the torch.optim one"
            raise TypeError(msg)
        record = self._registry.add(optimizer)
        if self._last_backward is not None:
            stepping.catch_up(record, *self._last_backward)
        return record

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by their scale, in place.

        One pass: also measures their norm and finds overflows. No host sync. Gradients that a
        later backward adds are unscaled as well. :meth:`ensure_unscaled` may be called again.

        Args:
            optimizer: The optimizer.

        Raises:
            RuntimeError: Called twice, or after ``step()``, without new gradients; or before ``scale()``.
            ValueError: A gradient is float16.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        record = self._record(optimizer)
        new = any(record.slot in one.touched for one in record.sets)
        if record.stage is OptState.UNSCALED and not new:
            msg = (
                "unscale_() has already been called on this optimizer since the last update(). "
                "Call it once, or use ensure_unscaled(), which may be repeated."
            )
            raise RuntimeError(msg)
        if record.stage is OptState.STEPPED and not new:
            msg = "unscale_() is being called after step(). Call it between backward() and step()."
            raise RuntimeError(msg)
        self._unscale(record)

    def _unscale(self, record: OptimizerRecord) -> tuple[Tensor, Tensor]:
        result = stepping.check(self, record, write=True)
        record.stage = OptState.UNSCALED
        for one in record.sets:
            one.touched.discard(record.slot)
        return result

    def ensure_unscaled(self, optimizer: Optimizer) -> None:
        """Unscale the optimizer's gradients if they are not; may be called any number of times.

        Args:
            optimizer: The optimizer.

        Raises:
            RuntimeError: Called before ``scale()``.
            ValueError: A gradient is float16.
        """
        if self._enabled:
            self._check_scale_growth_tracker("ensure_unscaled")
            self._unscale(self._record(optimizer))

    def clip_grad_norm_(
        self,
        optimizer_or_params: Optimizer | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        fold: bool = False,
    ) -> Tensor:
        """Clip the norm of the unscaled gradients; see :func:`amp_plugin.scaling.clipping.clip_norm`."""
        return clipping.clip_norm(
            self, optimizer_or_params, max_norm, norm_type, error_if_nonfinite, fold=fold
        )

    def clip_grad_value_(
        self, optimizer_or_params: Optimizer | Tensor | Iterable[Tensor], clip_value: float
    ) -> None:
        """Clip every element of the unscaled gradients to [-clip_value, clip_value]."""
        clipping.clip_value(self, optimizer_or_params, clip_value)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, and call ``optimizer.step`` unless a gradient is not finite.

        Waits for the device only if neither the optimizer supports AMP (``fused=True``) nor
        ``sync_free`` is set. An optimizer without gradients steps as it would without a scaler.

        Args:
            optimizer: The optimizer.
            *args: For ``optimizer.step``; a callable first one is a closure.
            **kwargs: For ``optimizer.step``; ``closure`` may scale and run backward itself.

        Returns:
            What ``optimizer.step`` returns, None if it was skipped; :meth:`last_step` tells more.

        Raises:
            RuntimeError: Called twice without new gradients, or before ``scale()``.
        """
        if not self._enabled:
            value = optimizer.step(*args, **kwargs)
            self.note_step(optimizer)
            return value
        closure, args, kwargs = closures.take_closure(args, kwargs)
        if closure is not None:
            return closures.step(self, self._record(optimizer), optimizer, closure, args, kwargs)
        self._check_scale_growth_tracker("step")
        record = self._record(optimizer)
        if record.stage is OptState.STEPPED and not any(record.slot in one.touched for one in record.sets):
            msg = "step() has already been called since the last update(). Run backward() or update() first."
            raise RuntimeError(msg)
        return stepping.step(self, record, optimizer, args, kwargs)

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return what became of the optimizer's last step; of a disabled scaler, that it was taken.

        Args:
            optimizer: The optimizer.

        Raises:
            RuntimeError: It has not stepped yet.
        """
        record = self._registry.find(optimizer)
        result = (record and record.result) or self._passed.get(optimizer)
        if result is None:
            msg = "last_step(): this optimizer has not stepped under this scaler; call step(optimizer) first"
            raise RuntimeError(msg)
        return result

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of one optimizer or of all: a host sync.

        Args:
            optimizer: The optimizer; None for all.
        """
        if optimizer is None:
            return self._skipped_before + (0 if self._skipped is None else int(self._skipped.item()))
        record = self._registry.find(optimizer)
        return 0 if record is None or record.skipped is None else int(record.skipped.item())


def _named(names: Any) -> dict[str, Tensor]:
    pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names or {}
    try:
        named = dict(pairs)
    except (TypeError, ValueError):
        named = {"": None}
    if not all(isinstance(param, Tensor) for param in named.values()):
        msg = (
            f"register(names=...): a module, its named_parameters(), or a mapping of names to parameters is "
            f"wanted, got {type(names).__name__}"
        )
        raise TypeError(msg)
    return named
