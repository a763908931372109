"""How many bytes training holds for each parameter, between two optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.weights.weight_store import store_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """Bytes held between two optimizer steps, by this process.

    Attributes:
        parameters: Elements of all parameters, tied ones once; of sharded ones, this rank's.
        weights: Of the parameters themselves.
        masters: Kept beside them: low halves, or float32 masters.
        gradients: Of the gradients that are there now.
        optimizer_state: Of the tensors in the optimizers' state.
    """

    parameters: int
    weights: int
    masters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.optimizer_state

    def per_parameter(self) -> dict[str, float]:
        """Return the bytes a parameter of each kind, and of all: ``{"weights": 2.0, ...}``."""
        count = max(1, self.parameters)
        kinds = ("weights", "masters", "gradients", "optimizer_state", "total")
        return {kind: getattr(self, kind) / count for kind in kinds}

    def __str__(self) -> str:
        """Say it in one line."""
        counts = self.per_parameter()
        parts = ", ".join(
            f"{name} {counts[kind]:.3g}"
            for kind, name in (
                ("weights", "weights"),
                ("masters", "kept beside them"),
                ("gradients", "gradients"),
                ("optimizer_state", "optimizer state"),
            )
        )
        return f"{counts['total']:.3g} bytes a parameter ({parts}) for {self.parameters} parameters"


def weight_bytes(model: nn.Module, *optimizers: Optimizer) -> WeightBytes:
    """Count the bytes that training holds for a model's parameters; no host sync.

    Args:
        model: The model, or what wraps it.
        *optimizers: Those that step it; torch's or a framework's.

    Returns:
        What is held now: call it after ``backward`` of the second step, when gradients and state are there.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> print(weight_bytes(model))
        4 bytes a parameter (weights 4, kept beside them 0, gradients 0, optimizer state 0) for 4 parameters
    """
    params = list(model.parameters())
    store = store_of(model)
    state = (entry for optimizer in optimizers for entry in optimizer.state.values())
    return WeightBytes(
        parameters=sum(local_of(param).numel() for param in params),
        weights=_bytes(params),
        masters=0 if store is None else _bytes(weight.rest for weight in store),
        gradients=_bytes(param.grad for param in params if param.grad is not None),
        optimizer_state=_bytes(value for entry in state for value in _tensors(entry)),
    )


def _tensors(entry: object) -> list[Tensor]:
    return [value for value in entry.values() if isinstance(value, Tensor)] if isinstance(entry, dict) else []


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_of(tensor).numel() * tensor.element_size() for tensor in tensors)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor its shard, of any other all of it."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
