"""What the printed graphs use: the same names for amp_plugin's autocast and for torch's.

``Ours`` and ``Theirs`` differ only where the documentation says that amp_plugin does.
"""

import contextlib

import torch
import torch.nn.functional as F  # noqa: F401 - for the graphs
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # noqa: F401 - for the graphs

import amp_plugin

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Ours:
    """amp_plugin: sees writes, casts nothing in a backward pass."""

    library = amp_plugin

    def autocast(self, dtype: str, **options: bool) -> torch.autocast:
        return self.library.autocast("cpu", dtype=DTYPES[dtype], **options)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass, perhaps with a region around it."""
        loss.backward()

    def written(self) -> None:
        """A weight was written, maybe through ``.data``: nothing shows that, in torch's blocks and in ours."""
        torch.clear_autocast_cache()


class Theirs(Ours):
    """torch.autocast, helped where it would use a stale cast or cast in a backward pass."""

    library = torch.amp

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass as outside any region."""
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
    """Run a backward pass from all values that have one."""
    losses = [(value.float() * value.float()).mean() for value in values if value.requires_grad]
    if losses:
        side.backward(sum(losses))


def step(weight: Tensor, **options: bool) -> None:
    """Step one weight by an optimizer, with a gradient made up for it."""
    kept, weight.grad = weight.grad, torch.full_like(weight, 0.25)
    torch.optim.SGD([weight], lr=0.125, **options).step()
    weight.grad = kept
