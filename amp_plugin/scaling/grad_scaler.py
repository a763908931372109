"""GradScaler: keep gradients representable, step safely."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_plugin.kernels.build import native_core
from amp_plugin.scaling import folding, stepping, updating
from amp_plugin.scaling.backward_events import after_backward, watch
from amp_plugin.scaling.distributed import Groups
from amp_plugin.scaling.loss_scale import (
    ConstantLossScale,
    DynamicLossScale,
    HysteresisMode,
    LossScale,
    LossScaleOptions,
)
from amp_plugin.scaling.outputs import scale_outputs
from amp_plugin.scaling.registry import OptimizerRecord, Registry
from amp_plugin.scaling.state import ScalerState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class GradScaler(ScalerState):
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
        losses: Names of losses with a scale of their own, for ``scale(loss, name=...)``; a loss scaled
            without a name has the scaler's.
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
        self._loss_scales = {name: new_scale() for name in _checked_names(losses)}
        self._groups = Groups(tuple(process_groups), tuple(sharded_groups))
        self._fp16_gradients = fp16_gradients
        self._sync_free = sync_free
        self._start()

    @classmethod
    def from_options(cls, device: str, options: LossScaleOptions, **others: Any) -> GradScaler:
        """Make a scaler from a loss scale's options and the constructor's other arguments."""
        return cls(
            device, **{field.name: getattr(options, field.name) for field in fields(options)}, **others
        )

    def _start(self) -> None:
        """Set what a copy or a pickled scaler starts without."""
        self._registry = Registry(self._loss_scale)
        self._requested = False
        self._core_agreed = False
        self._skipped = None
        self._floor = []
        self._open_results = weakref.WeakKeyDictionary()
        self._passed = weakref.WeakKeyDictionary()
        self._norms = weakref.WeakKeyDictionary()
        self._last_backward = None
        self._backward = -1
        if self._enabled:
            native_core()

    def scale(self, outputs: T, *, name: str | None = None) -> T:
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

    def _begin_backward(self, loss_scale: LossScale) -> None:
        """Called before a backward from an output scaled by ``loss_scale`` makes gradients."""
        backward = torch._C._current_graph_task_id()
        if self._last_backward is not None and backward == self._backward:
            if self._last_backward[0] is not loss_scale:
                msg = (
                    "one backward() brings gradients of two losses with scales of their own, which cannot be "
                    "told apart: call backward() on each scaled loss, one after the other."
                )
                raise RuntimeError(msg)
            return
        self._backward = backward
        self._last_backward = (loss_scale, loss_scale.generation, loss_scale.snapshot())
        again = [
            r for r in self._registry if r.stage is OptState.UNSCALED and any(s.unit is None for s in r.sets)
        ]
        for record in self._registry:
            folding.write_clip(record)
        for gradients in self._registry.sets():
            gradients.begin_backward(loss_scale)
        for record in self._registry:
            if record.norm is not None:
                for gradients in record.sets:
                    gradients.mark_backward()
        if again:
            after_backward(lambda: self._unscale_again(again))

    def _unscale_again(self, records: list[OptimizerRecord]) -> None:
        """After a backward in mid-window: what was unscaled before it is unscaled again."""
        for record in records:
            if record.stage is OptState.UNSCALED:
                stepping.check(self, record, write=True)

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


def _checked_names(losses: Sequence[str]) -> Sequence[str]:
    if isinstance(losses, str) or len(set(losses)) < len(losses):
        msg = f"losses={losses!r} is not allowed; give a list of different names, such as ['pixel', 'edges']"
        raise ValueError(msg)
    return losses


def _usable(device: str) -> bool:
    torch.device(device)  # raises for a device that there is not
    if device.startswith("cuda") and not torch.cuda.is_available():
        warnings.warn(
            "GradScaler(device='cuda') is disabled: CUDA is not available. "
            "Pass device='cpu' to scale on the CPU.",
            UserWarning,
            stacklevel=3,
        )
        return False
    return True
