"""Takes a step of torch's Muon: an amp_plugin op, then torch's matrix products, then a second amp_plugin op.

- The op rule ``muon_momentum`` unscales the gradient, updates momentum_buffer, and writes the input of the
  matrix products.
- The matrix products are those of torch's Newton-Schulz iteration, in bfloat16.
- The op rule ``muon_update`` applies weight decay, and subtracts the scaled result of the matrix products
  from the parameter.

Each gradient is read once. The matrices are stepped one after another, so the temporary memory holds a single
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import _muon

from amp_plugin.kernels import ops  # noqa: F401 -- defines the ops
from amp_plugin.weights.shard import local_of

_products: Final = getattr(_muon, "_zeropower_via_newtonschulz", None)
_adjust_lr: Final = getattr(_muon, "_adjust_lr", None)


def step_of(tensors: Any, group: dict[str, Any]) -> Callable[..., None]:
    """Return the function that takes Muon's step for one parameter group.

    For other optimizers, this function is ``StepTensors.step_``, which has the same arguments: the numbers of
    the op rule (here ``muon_momentum``), ``lr``, ``grad_scale`` and ``found_inf``.

    Args:
        tensors: The tensors of the group, as a ``StepTensors`` of the native extension.
        group: The parameter group.

    Raises:
        ValueError: The matrices are sharded, but Muon's products need whole matrices.
    """
    if any(local_of(param) is not param for param in group["params"]):
        msg = "its matrix products need whole matrices, but its parameters are sharded"
        raise ValueError(msg)
    return partial(_step_, tensors, group)


@torch.no_grad()
def _step_(
    tensors: Any,
    group: dict[str, Any],
    numbers: list[float],
    lr: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Step the parameters of a group."""
    skipped = found_inf is not None and found_inf.is_cpu and found_inf.item() > 0
    late = {"grad_scale": grad_scale, "found_inf": found_inf}
    for i, (param, grad, buffer) in enumerate(
        zip(tensors.params, tensors.grads, tensors.states, strict=True)
    ):
        made = torch.empty_like(grad, dtype=torch.float32)
        torch.ops.amp_plugin.step_([made], [grad], [buffer], [], [], "muon_momentum", numbers, **late)
        if not skipped:
            _update(param, group, tensors.remainders[i : i + 1], made, lr, found_inf)
    tensors.round_masters()


def _update(
    param: Tensor,
    group: dict[str, Any],
    remainder: list[Tensor],
    made: Tensor,
    lr: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Compute the matrix products of one parameter, and update this parameter."""
    products = _products(made, group["ns_coefficients"], group["ns_steps"], group["eps"])  # type: ignore[misc]
    ratio = _adjust_lr(1.0, group["adjust_lr_fn"], param.shape)  # type: ignore[misc]
    numbers = [0.0 if lr is not None else float(group["lr"]), group["weight_decay"], ratio]
    late = {"lr": lr, "found_inf": found_inf}
    torch.ops.amp_plugin.step_([param], [products], [], [], remainder, "muon_update", numbers, **late)


def why_not() -> str:
    """Return the reason why Muon cannot step in one pass with this torch release, or ``""`` if it can."""
    known = _products is not None and _adjust_lr is not None
    return (
        "" if known else "torch.optim.Muon of this torch release computes its matrix products in another way"
    )
