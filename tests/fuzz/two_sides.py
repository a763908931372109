"""The names that printed graphs use, for amp_plugin's autocast and for torch's.

``Ours`` and ``Theirs`` differ only where the documentation says that amp_plugin differs from torch.
"""

import contextlib

import torch
import torch.nn.functional as F  # noqa: F401 - for the graphs
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # noqa: F401 - for the graphs

import amp_plugin

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Ours:
    """amp_plugin: it notices writes, and casts nothing in a backward pass."""

    library = amp_plugin

    def autocast(self, dtype: str, **options: bool) -> torch.autocast:
        return self.library.autocast("cpu", dtype=DTYPES[dtype], **options)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass, possibly inside a region."""
        loss.backward()

    def written(self) -> None:
        """A weight was written, possibly through ``.data``.

        No version counter shows that, in torch's blocks or in ours.
        """
        torch.clear_autocast_cache()


class Theirs(Ours):
    """torch.autocast, with help where it would use a stale cast or cast in a backward pass."""

    library = torch.amp

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass as if outside of any region."""
        inside = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if inside else contextlib.nullcontext():
            loss.backward()


def product_of(side: Ours) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @side.library.custom_fwd(device_type="cpu")
        def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @side.library.custom_bwd(device_type="cpu")
        def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return grad @ b.T, a.T @ grad

    return Product


def backward(side: Ours, *values: Tensor) -> None:
    """Run a backward pass from all values that require grad."""
    losses = [(value.float() * value.float()).mean() for value in values if value.requires_grad]
    if losses:
        side.backward(sum(losses))


def step(weight: Tensor, **options: bool) -> None:
    """Step one weight with an optimizer and an invented gradient."""
    kept, weight.grad = weight.grad, torch.full_like(weight, 0.25)
    torch.optim.SGD([weight], lr=0.125, **options).step()
    weight.grad = kept
