"""Computes the gradients for gradient penalties, with loss scaling.

::

    scaled = d(outputs * scale) / d(inputs)
    grads = scaled / scale

The scaled gradients are computed outside autocast. Half-precision gradients are converted to float32 before
they are unscaled. With ``create_graph=True``, the unscaled gradients are differentiable.

If the scaled gradients overflow, the penalty and its backward pass overflow too, and the optimizer step is
skipped. The overflow also lowers the loss scale at the next update. No function of this module waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.loss_scale import LossScale
from amp_plugin.weights.formats import HALVES


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    *,
    scaler: GradScaler | None = None,
    grad_outputs: Tensor | Sequence[Tensor] | None = None,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Multiply outputs by the loss scale, call ``torch.autograd.grad``, and return unscaled gradients.

    Args:
        outputs: The tensors to differentiate. The tensors must be 0-dim if ``grad_outputs`` is None.
        inputs: The tensors with respect to which the outputs are differentiated.
        scaler: The scaler whose scale is used. With None or a disabled scaler nothing is scaled.
        grad_outputs: The vectors of the vector-Jacobian product, as in ``torch.autograd.grad``.
        create_graph: True to make the result differentiable.
        retain_graph: As in ``torch.autograd.grad``; None means the value of ``create_graph``.
        allow_unused: True to return None for inputs that were not used, instead of raising.

    Returns:
        The unscaled gradients, one for each input. Gradients in half precision become float32.

    Example:
        >>> import torch
        >>> from amp_plugin import GradScaler
        >>> from amp_plugin.scaling.penalty import grad
        >>> x = torch.ones(3, requires_grad=True)
        >>> grad((x**2).sum(), x, scaler=GradScaler("cpu"), create_graph=True)[0].tolist()
        [2.0, 2.0, 2.0]
    """
    targets = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    sources = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    vectors = (grad_outputs,) if isinstance(grad_outputs, Tensor) else grad_outputs
    loss_scale = scaler.loss_scale if scaler is not None and scaler.is_enabled() else None
    with torch.autocast(targets[0].device.type, enabled=False), ExitStack() as surroundings:
        for context in _surroundings:
            surroundings.enter_context(context())
        if loss_scale is not None:
            # This backward pass needs no hook that records it, because it does not write to ``.grad``.
            targets = tuple(map(loss_scale.multiply, targets))
        grads = torch.autograd.grad(
            targets,
            sources,
            grad_outputs=vectors,
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=allow_unused,
        )
        wide = tuple(g.float() if g is not None and g.dtype in HALVES else g for g in grads)
        if scaler is None or loss_scale is None:
            return wide
        scaler.core.shared.note_check()
        return _unscaled(grads, wide, loss_scale)


def gradient_penalty(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    *,
    scaler: GradScaler | None = None,
    kind: Literal["l2", "wgan-gp"] = "l2",
    target: float = 1.0,
) -> Tensor:
    """Return a differentiable penalty on the gradients of ``outputs``.

    ``"l2"`` is the squared L2 norm of all gradients together (Drucker and LeCun 1992). ``"wgan-gp"`` is the
    mean of ``(norm - target)**2`` over the samples (Gulrajani and others 2017), where the norm of a sample's
    gradient is taken over all dimensions except the first.

    Args:
        outputs: The tensors to differentiate. A critic's scores are summed.
        inputs: The tensors with respect to which the outputs are differentiated. With ``"wgan-gp"`` the
            inputs are samples; with ``"l2"`` the inputs can also be parameters.
        scaler: The scaler whose scale is used.
        kind: The penalty.
        target: The norm at which the penalty is 0, for ``kind="wgan-gp"``.

    Returns:
        The penalty (float32, 0-dim). Add the penalty to the loss before you call ``scaler.scale``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind not in {"l2", "wgan-gp"}:
        msg = f"kind={kind!r} is not known; use 'l2' or 'wgan-gp'"
        raise ValueError(msg)
    tensors = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    with torch.autocast(tensors[0].device.type, enabled=False):
        totals = [tensor.float().sum() for tensor in tensors]
        grads = [g for g in grad(totals, inputs, scaler=scaler, create_graph=True) if g is not None]
        if kind == "l2":
            return torch.stack([g.square().sum() for g in grads]).sum()
        norms = torch.linalg.vector_norm(torch.cat([g.flatten(1) for g in grads], dim=1), dim=1)
        penalty: Tensor = (norms - target).square().mean()
        return penalty


def _unscaled(
    grads: Sequence[Tensor | None], wide: Sequence[Tensor | None], loss_scale: LossScale
) -> tuple[Tensor | None, ...]:
    """Divide gradients by the loss scale, and record for its next update whether a gradient overflowed."""
    present = [g.detach() for g in grads if g is not None]
    for device in {g.device for g in present}:
        own = [g for g in present if g.device == device]
        inverse = loss_scale.snapshot(device, inverse=True)
        loss_scale.record(torch.ops.amp_plugin.norm_check(own, inverse, 2.0)[1])
    return tuple(None if g is None else g * loss_scale.snapshot(g.device, inverse=True) for g in wide)


_surroundings: list[Callable[[], AbstractContextManager[Any]]] = []


def surround_backward(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run this module's later calls to ``torch.autograd.grad`` inside ``context()``, as Fabric requires."""
    if context not in _surroundings:
        _surroundings.append(context)
