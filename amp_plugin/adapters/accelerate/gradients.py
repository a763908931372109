"""What AmpAccelerator does with gradients: unscale, clip, penalize, report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate.optimizer import (
    naming_unprepared,
    refuse_before_backward,
    torch_optimizer,
)
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.penalty import grad, gradient_penalty

if TYPE_CHECKING:
    from amp_plugin.adapters.unscaled_steps import UnscaledSteps
    from amp_plugin.scaling.step_result import StepResult


class Gradients(Accelerator):
    """The methods of AmpAccelerator that touch gradients or tell what became of them."""

    scaler: GradScaler | None
    _engaged: bool
    _unscaled_steps: UnscaledSteps

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale the gradients of the given optimizers, of all by default; may be repeated."""
        if not self._engaged:
            super().unscale_gradients(optimizer)
            return
        if self.scaler is None:
            return
        given: Any = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, list | tuple) else [given]:
            self.scaler.ensure_unscaled(torch_optimizer(one))

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor] | Optimizer,
        max_norm: float,
        norm_type: float = 2,
    ) -> Tensor | None:
        """Clip the norm of unscaled gradients, at the end of an accumulation window only.

        Args:
            parameters: parameters, of one optimizer or of several, or a prepared optimizer.
            max_norm: largest norm.
            norm_type: the p of the norm.

        Returns:
            The norm before clipping, 0-dim, fp32; within a window, where nothing is clipped, that of
            the gradients so far (under FSDP nan: they are not reduced yet).
        """
        params = _parameters(parameters)
        if not self._engaged:
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[no-any-return]
        if not self.sync_gradients:
            return self._norm_so_far(params, norm_type)
        if self.scaler is None or (self.distributed_type == DistributedType.FSDP and not self.is_fsdp2):
            norm: Tensor | None = super().clip_grad_norm_(params, max_norm, norm_type)
            self._note(params, norm)
            return norm
        refuse_before_backward(self.scaler, "clip_grad_norm_()")
        with naming_unprepared(self.scaler, params, "clip_grad_norm_()"):
            return self.scaler.clip_grad_norm_(params, max_norm, norm_type)

    def _note(self, params: list[Tensor], norm: Tensor | None) -> None:
        """Keep the norm for the optimizer that has these parameters, for ``last_step``."""
        given = set(map(id, params))
        for optimizer in map(torch_optimizer, self._optimizers):
            if norm is not None and given == set(map(id, _parameters(optimizer))):
                self._unscaled_steps.note(optimizer, norm)

    def _norm_so_far(self, params: list[Tensor], norm_type: float) -> Tensor:
        if self.distributed_type == DistributedType.FSDP:
            return torch.full((), math.nan)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        scale = None if self.scaler is None else self.scaler._scale
        return norm if scale is None else norm / scale

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor] | Optimizer, clip_value: float) -> None:
        """Clip each element of unscaled gradients, at the end of an accumulation window only.

        Args:
            parameters: as for :meth:`clip_grad_norm_`.
            clip_value: largest absolute value.
        """
        params = _parameters(parameters)
        if self._engaged and not self.sync_gradients:
            return
        if not self._engaged or self.scaler is None or self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(params, clip_value)
        else:
            refuse_before_backward(self.scaler, "clip_grad_value_()")
            with naming_unprepared(self.scaler, params, "clip_grad_value_()"):
                self.scaler.clip_grad_value_(params, clip_value)

    def grad(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Differentiate as ``torch.autograd.grad``, scaled on the way: :func:`amp_plugin.scaling.grad`."""
        return grad(outputs, inputs, scaler=self._amp_scaler(), **kwargs)

    def gradient_penalty(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **kwargs: Any
    ) -> Tensor:
        """Return a penalty to add to the loss; see :func:`amp_plugin.scaling.gradient_penalty`.

        Args:
            outputs: what to differentiate, e.g. a critic's scores.
            inputs: with respect to what.
            **kwargs: ``kind="l2"`` or ``"wgan-gp"``, ``target``.

        Returns:
            float32, 0-dim, unscaled: ``accelerator.backward(loss + 10 * penalty)``.
        """
        return gradient_penalty(outputs, inputs, scaler=self._amp_scaler(), **kwargs)

    def _amp_scaler(self) -> GradScaler | None:
        return self.scaler if isinstance(self.scaler, GradScaler) and self.scaler.is_enabled() else None

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return what became of an optimizer's last step: skipped, norm, scale, which parameters overflowed.

        Args:
            optimizer: prepared or not.

        Returns:
            The result; where nothing is scaled (bf16, no mixed precision) no step is skipped, both
            scales are 1 and ``norm`` is that of :meth:`clip_grad_norm_`, if its parameters were clipped.

        Raises:
            RuntimeError: the optimizer has not stepped yet; or another engine steps (DeepSpeed, ...).
        """
        if not self._engaged:
            msg = (
                f"last_step(): steps are left to Accelerate's own code here ({self.distributed_type}, "
                f"{self.mixed_precision}); ask accelerator.optimizer_step_was_skipped"
            )
            raise RuntimeError(msg)
        scaler, optimizer = self._amp_scaler(), torch_optimizer(optimizer)
        return self._unscaled_steps.last(optimizer) if scaler is None else scaler.last_step(optimizer)

    def amp_metrics(self) -> dict[str, float | int]:
        """Return ``loss_scale`` and ``skipped_steps`` for ``accelerator.log``: a host sync.

        1.0 and 0 where nothing is scaled; empty where another engine steps (DeepSpeed, ...).
        """
        if not self._engaged:
            return {}
        scaler = self._amp_scaler()
        if scaler is None:
            return {"loss_scale": 1.0, "skipped_steps": 0}
        return {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps()}


def _parameters(given: Tensor | Iterable[Tensor] | Optimizer) -> list[Tensor]:
    if isinstance(given, Optimizer):
        return [param for group in given.param_groups for param in group["params"]]
    return [given] if isinstance(given, Tensor) else list(given)
