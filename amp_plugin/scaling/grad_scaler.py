"""GradScaler: keep gradients representable, step safely."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_plugin.kernels.build import native_core
from amp_plugin.scaling import clipping, closures, folding, stepping, updating
from amp_plugin.scaling.backward_events import after_backward, watch
from amp_plugin.scaling.distributed import Groups
from amp_plugin.scaling.loss_scale import ConstantLossScale, DynamicLossScale, HysteresisMode, LossScale
from amp_plugin.scaling.outputs import scale_outputs
from amp_plugin.scaling.registry import OptimizerRecord, Registry
from amp_plugin.scaling.state import ScalerState
from amp_plugin.scaling.step_result import HostFlag, StepResult
from amp_plugin.scaling.torch_interface import TorchInterface

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class GradScaler(ScalerState, TorchInterface):
    """Scale losses, unscale gradients, skip steps that overflow.

    A drop-in for :class:`torch.amp.GradScaler`: same methods, same numbers. Beyond it, a gradient
    is divided by exactly the scale it was made with, once, whatever the number of optimizers,
    losses and calls::

        scale(loss):      apply a requested update; return loss * scale
        backward begins:  convert gradients in other units to this scale
        step(optimizer):  unscale what is not unscaled; step if all gradients are finite, on all ranks
        update():         request: applied once no registered optimizer holds unused scaled gradients,
                          at the latest by end_iteration() or the next scale(), which rescale them

    Args:
        device: Device type of the losses.
        init_scale: The first scale.
        growth_factor: Factor of a growth, more than 1.
        backoff_factor: Factor of a backoff, between 0 and 1.
        growth_interval: Good optimizer steps in a row before a growth.
        enabled: False makes every method pass through.
        min_scale: Floor of the scale; None means 1, or ``init_scale`` if that is lower.
        max_scale: Ceiling of the scale; None means float32's largest number.
        hysteresis: Overflows tolerated before a backoff, the last included.
        hysteresis_mode: When that tolerance is restored: ``"apex"`` (any good step), ``"megatron"`` or
            ``"deepspeed"`` (a whole growth interval).
        on_min_scale: On overflow at the floor: ``"hold"`` it, or ``"raise"`` FloatingPointError.
        dynamic: False keeps the scale constant; overflowing steps are skipped all the same.
        losses: Names of losses with a scale of their own, for ``scale(loss, name=...)``.
        process_groups: Groups whose ranks take the same decision.
        sharded_groups: Groups whose ranks hold different parts of the plain gradients (FSDP1):
            as ``process_groups``, and norms are added up over them.
        fp16_gradients: True allows unscaling float16 gradients, which loses small ones.
        sync_free: True skips steps of optimizers without AMP support on the device, without
            waiting for it; see :mod:`amp_plugin.scaling.sync_free`.

    Raises:
        ValueError: A number is out of range, or an option unknown.

    Example:
        >>> import torch
        >>> from amp_plugin import GradScaler
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step(optimizer).skipped
        False
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        hysteresis_mode: HysteresisMode = "apex",
        on_min_scale: Literal["hold", "raise"] = "hold",
        dynamic: bool = True,
        losses: Sequence[str] = (),
        process_groups: Sequence[ProcessGroup] = (),
        sharded_groups: Sequence[ProcessGroup] = (),
        fp16_gradients: bool = False,
        sync_free: bool = False,
    ) -> None:
        self._device = str(device)
        self._enabled = enabled and _usable(self._device)
        if on_min_scale not in {"hold", "raise"}:
            msg = f"on_min_scale={on_min_scale!r} is not known; use 'hold' or 'raise'"
            raise ValueError(msg)

        def new_scale() -> LossScale:
            if not dynamic:
                return ConstantLossScale(init_scale)
            return DynamicLossScale(
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                min_scale=min_scale,
                max_scale=max_scale,
                hysteresis=hysteresis,
                hysteresis_mode=hysteresis_mode,
                watch_floor=on_min_scale == "raise",
            )

        self._loss_scale = new_scale()
        self._loss_scales = {name: new_scale() for name in losses}
        self._groups = Groups(tuple(process_groups), tuple(sharded_groups))
        self._core_agreed = False
        self._fp16_gradients = fp16_gradients
        self._sync_free = sync_free
        self._start()

    def _start(self) -> None:
        """Set what a copy or a pickled scaler starts without."""
        self._registry = Registry(self._loss_scale)
        self._requested = False
        self._skipped: Tensor | None = None
        self._floor: list[HostFlag] = []
        self._open_results: list[tuple[StepResult, LossScale]] = []
        self._last_backward: tuple[LossScale, int, Tensor] | None = None
        if self._enabled:
            native_core()

    # -- scaling ---------------------------------------------------------------------------------

    def scale(self, outputs: T, *, name: str | None = None) -> T:  # type: ignore[override]
        """Multiply a loss, or every tensor of a container of losses, by the loss scale.

        Applies an update that is still requested. No host sync.

        Args:
            outputs: A tensor, or a list, tuple, named tuple, dict or other iterable of such.
            name: One of the constructor's ``losses``: scale by its own scale.

        Returns:
            The same structure, scaled; float16 becomes float32, so that it cannot overflow here.

        Raises:
            ValueError: ``outputs`` is something else, or ``name`` unknown.
        """
        if not self._enabled:
            return outputs
        loss_scale = self._loss_scale_of(name)
        updating.settle(self, force=True)

        def apply(tensor: Tensor) -> Tensor:
            loss_scale.materialize(tensor.device)
            if tensor.dtype is torch.float16 and tensor.dim():
                tensor = tensor.float()
            scaled = tensor * loss_scale.snapshot_on(tensor.device)
            watch(scaled, self, loss_scale)
            return scaled

        return cast("T", scale_outputs(outputs, apply))

    def _loss_scale_of(self, name: str | None) -> LossScale:
        if name is None:
            return self._loss_scale
        if name not in self._loss_scales:
            known = ", ".join(self._loss_scales) or "none"
            msg = f"loss {name!r} is not known; the constructor's losses= named: {known}"
            raise ValueError(msg)
        return self._loss_scales[name]

    def _first_materialized(self) -> LossScale | None:
        if self._loss_scale.value is not None:
            return self._loss_scale
        return next((one for one in self._loss_scales.values() if one.value is not None), None)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        record = self._record(optimizer)
        stepping.check(self, record, write=False)
        return record.found_inf_per_device

    def _all_loss_scales(self) -> list[LossScale]:
        return [self._loss_scale, *self._loss_scales.values()]

    def _begin_backward(self, loss_scale: LossScale) -> None:
        """Called before a backward from an output scaled by ``loss_scale`` makes gradients."""
        self._last_backward = (loss_scale, loss_scale.generation, loss_scale.snapshot())
        again = [
            r for r in self._registry if r.stage is OptState.UNSCALED and any(s.unit is None for s in r.sets)
        ]
        for record in self._registry:
            folding.write_clip(record)
        for gradients in self._registry.sets():
            gradients.begin_backward(loss_scale)
        if again:
            after_backward(lambda: self._unscale_again(again))

    def _unscale_again(self, records: list[OptimizerRecord]) -> None:
        """After a backward in mid-window: what was unscaled before it is unscaled again."""
        for record in records:
            if record.stage is OptState.UNSCALED:
                stepping.check(self, record, write=True)

    # -- optimizers ------------------------------------------------------------------------------

    def register(self, *optimizers: Optimizer, names: Any = None) -> None:
        """Make optimizers known before their first step.

        A plain loop with one optimizer need not; with several, ``update()`` can only wait for the
        gradients of those it knows.

        Args:
            *optimizers: The optimizers.
            names: Their parameters' names for :meth:`last_step`'s ``overflow_report()``: a module, the
                pairs of ``module.named_parameters()``, or a mapping of names to parameters.
        """
        if not self._enabled:
            return
        named = dict(names.named_parameters() if isinstance(names, torch.nn.Module) else names or {})
        by_id = {id(param): name for name, param in named.items()}
        for optimizer in optimizers:
            record = self._record(optimizer)
            if named:
                defaults = OptimizerRecord.all_names(record)
                record.names = [by_id.get(id(p), d) for p, d in zip(record.params, defaults, strict=True)]

    def _record(self, optimizer: Optimizer) -> OptimizerRecord:
        record = self._registry.find(optimizer)
        if record is not None:
            if self._registry.refresh(record):
                record.names = None
            return record
        if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
            msg = f"expected an optimizer with param_groups, got {type(optimizer).__name__}; pass the torch.optim one"
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

    # -- stepping --------------------------------------------------------------------------------

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
            return optimizer.step(*args, **kwargs)
        closure, args, kwargs = closures.take_closure(args, kwargs)
        if closure is not None:
            return closures.step(self, self._record(optimizer), optimizer, closure, args, kwargs)
        self._check_scale_growth_tracker("step")
        record = self._record(optimizer)
        if record.stage is OptState.STEPPED and not any(record.slot in one.touched for one in record.sets):
            msg = "step() has already been called since the last update(). Run backward() or update() in between."
            raise RuntimeError(msg)
        return stepping.step(self, record, optimizer, args, kwargs)

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return what became of the optimizer's last step.

        Args:
            optimizer: The optimizer.

        Raises:
            RuntimeError: It has not stepped yet.
        """
        record = self._registry.find(optimizer) if self._enabled else None
        if record is None or record.result is None:
            msg = "last_step(): this optimizer has not stepped under this scaler; call scaler.step(optimizer) first"
            raise RuntimeError(msg)
        return record.result

    def skipped_steps(self, optimizer: Optimizer | None = None) -> int:
        """Return how many steps were skipped, of one optimizer or of all: a host sync.

        Args:
            optimizer: The optimizer; None for all.
        """
        if optimizer is None:
            return self._skipped_before + (0 if self._skipped is None else int(self._skipped.item()))
        record = self._registry.find(optimizer)
        return 0 if record is None or record.skipped is None else int(record.skipped.item())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Request the scale's update; see the class for when it is applied.

        Args:
            new_scale: Set this scale instead, at once; pending gradients are converted.

        Raises:
            RuntimeError: Called before ``scale()``.
            FloatingPointError: With ``on_min_scale="raise"``: an overflow at the floor; on CUDA
                one update later.
        """
        if self._enabled:
            self._check_scale_growth_tracker("update")
            updating.request(self, new_scale)

    def end_iteration(self) -> None:
        """Apply a requested update now.

        For who knows where an iteration ends (adapters). Gradients that are still pending are
        multiplied by new/old; float16 ones are not, the update waits for their step.
        """
        if self._enabled:
            updating.settle(self, force=True)


def _usable(device: str) -> bool:
    if device.startswith("cuda") and not torch.cuda.is_available():
        warnings.warn(
            "GradScaler(device='cuda') is disabled: CUDA is not available. Pass device='cpu' to scale on the CPU.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return True
