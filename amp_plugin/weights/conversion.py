"""Which parameters are stored in 16 bits, and how a model that came in 16 bits gets float32 ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from amp_plugin.patterns import matched_modules, require_matches

HALVES = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What became float32.

    Attributes:
        count: Parameters.
        bytes: Of their elements in 16 bits, as they came; they take as many again now.
        dtype: In which they came.
    """

    count: int
    bytes: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Say it in one line, with the alternative."""
        name = str(self.dtype).removeprefix("torch.")
        form = "bf16" if self.dtype is torch.bfloat16 else "fp16"
        size = _megabytes(self.bytes)
        return (
            f"{self.count} trainable parameters came in {name} ({size}) and are float32 now ({size} more), "
            f"since 16 bits lose small updates. weights={form!r} keeps them in {name}, as exactly"
        )


def convert_to_fp32(model: nn.Module, *, only: Iterable[nn.Parameter] | None = None) -> Converted | None:
    """Convert the trainable parameters that come in 16 bits to float32, in place.

    Frozen ones stay as they are. Buffers in 16 bits of a module whose parameters are converted follow them.

    Args:
        model: Its parameters stay the objects they are; gradients that they have are converted too.
        only: Some of its parameters; None: all that are trainable.

    Returns:
        What was converted; None if nothing was.
    """
    wanted = trainable(model) if only is None else list(only)
    params = [param for param in wanted if param.dtype in HALVES]
    if not params:
        return None
    converted = Converted(
        count=len(params),
        bytes=sum(param.numel() * param.element_size() for param in params),
        dtype=params[0].dtype,
    )
    for param in params:
        widen_(param)
    own = set(params)
    for module in model.modules():
        if any(param in own for param in module.parameters(recurse=False)):
            _widen_buffers(module)
    return converted


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that require gradients, tied ones once."""
    return [param for param in model.parameters() if param.requires_grad]


def storable(model: nn.Module, fp32_modules: Iterable[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters to store in 16 bits, and those to keep in float32.

    Args:
        model: The model.
        fp32_modules: Names of modules, shell patterns allowed, or of their classes. Modules with running
            statistics (BatchNorm) are among them unasked: torch wants both in one dtype.

    Raises:
        ValueError: A pattern matches no module.
    """
    kept = {param for module in _kept_modules(model, fp32_modules) for param in module.parameters()}
    params = [
        param for param in trainable(model) if param.is_floating_point() and param.dtype is not torch.float64
    ]
    return [param for param in params if param not in kept], [param for param in params if param in kept]


def _kept_modules(model: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    patterns = list(patterns)
    require_matches([model], patterns)
    normalized = (module for module in model.modules() if isinstance(module, _NormBase))
    return [*normalized, *matched_modules(model, patterns).values()]


@torch.no_grad()
def widen_(param: Tensor) -> None:
    """Make a parameter float32, in place, and the gradient that it has."""
    grad, param.grad = param.grad, None
    param.data = param.data.float()
    if grad is not None:
        param.grad = grad.float()


def _widen_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if isinstance(buffer, Tensor) and buffer.dtype in HALVES:
            module._buffers[name] = buffer.float()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"
