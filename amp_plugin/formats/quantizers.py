"""Emulates formats below 16 bits with torchao's quantizers, which round matrices but keep their dtype.

A matrix product rounds both operands along the dimension over which it sums. A Linear layer runs three matrix
products. :class:`Rounded` emulates these products, with a quantizer ``Q``, in any format on any device:

- The output ``Q(x) @ Q(weight).T`` sums over ``in_features``.
- The gradient of the input, ``Q(grad) @ Q(weight.T).T``, sums over ``out_features``.
- The gradient of the weight, ``Q(grad.T) @ Q(x.T).T``, sums over the rows of ``x``.

For float32 inputs the results are bitwise equal to those of torchao's emulated float8 and mxfp8 layers. For
nvfp4 torchao has only GPU kernels. The Hadamard transform of torchao's nvfp4 kernels is emulated here with
torchao's matrix. The emulation of nvfp4 differs from torchao's kernels in two details. The emulation rounds
gradients to nearest, but the kernels round them stochastically. The emulation rounds weights in blocks of 16,
but the kernels use 16x16 tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

BLOCK: Final = {"mxfp8": 32, "nvfp4": 16}
"""Maps each block format to the number of elements in a row that share one scale."""


def quantize(matrix: Tensor, name: str, *, is_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Round a contiguous matrix to a format along its last dimension, with torchao's reference quantizers.

    Args:
        matrix: A 2-dim tensor in float32 or bfloat16. The row length is a multiple of the format's block
            size.
        name: ``"bf16"``, ``"fp8"``, ``"fp8-rowwise"``, ``"mxfp8"`` or ``"nvfp4"``.
        is_gradient: True if the matrix is the gradient of an output. For gradients of outputs, ``"fp8"`` uses
            e5m2, as torchao does.

    Returns:
        Two tensors: the rounded values, in the dtype of ``matrix``; and the scales, which are the float32
        factors by which the codes are multiplied. There is one scale for the matrix, for each row, or for
        each block.
    """
    return _QUANTIZERS[name](matrix, is_gradient)


def _bf16(matrix: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    return matrix.bfloat16().to(matrix.dtype), matrix.new_ones((), dtype=torch.float32)


def _float8(matrix: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # noqa: PLC0415 - optional
    from torchao.float8.float8_training_tensor import LinearMMConfig  # noqa: PLC0415

    codes = hp_tensor_to_float8_dynamic(matrix, dtype, LinearMMConfig(), **options)
    return codes.to_original_precision().to(matrix.dtype), codes._scale.reciprocal()


def _tensorwise(matrix: Tensor, is_gradient: bool) -> tuple[Tensor, Tensor]:
    from torchao.float8.config import e4m3_dtype, e5m2_dtype  # noqa: PLC0415 - optional

    return _float8(matrix, e5m2_dtype if is_gradient else e4m3_dtype)


def _rowwise(matrix: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    from torchao.float8.config import ScalingGranularity, e4m3_dtype  # noqa: PLC0415 - optional

    options = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    return _float8(matrix, e4m3_dtype, round_scales_to_power_of_2=True, **options)


def _mxfp8(matrix: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: PLC0415 - optional
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, get_fp_scale  # noqa: PLC0415

    codes: Any = MXTensor.to_mx(matrix, torch.float8_e4m3fn, BLOCK["mxfp8"], ScaleCalculationMode.RCEIL)
    return codes.dequantize(matrix.dtype), get_fp_scale(codes.scale)


def _nvfp4(matrix: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import (  # noqa: PLC0415 - optional
        NVFP4Tensor,
        per_tensor_amax_to_scale,
    )

    amax = matrix.abs().max().float()
    scale = per_tensor_amax_to_scale(torch.where(amax == 0, 1.0, amax))
    codes = NVFP4Tensor.to_nvfp4(matrix, BLOCK["nvfp4"], per_tensor_scale=scale)
    return codes.dequantize(matrix.dtype), codes.get_hp_scales()


_QUANTIZERS: Final[dict[str, Callable[[Tensor, bool], tuple[Tensor, Tensor]]]] = {
    "bf16": _bf16,
    "fp8": _tensorwise,
    "fp8-rowwise": _rowwise,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}

_SIGNS: Final = (1, 1, -1, 1, -1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1, -1)
"""The signs for the Hadamard transform. (torchao draws random signs for each layer.)"""


def transformed(matrix: Tensor) -> Tensor:
    """Spread out outliers with a Hadamard transform of each group of 16 elements in a row."""
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import (  # noqa: PLC0415 - optional
        get_rht_matrix,
    )

    basis = get_rht_matrix(_SIGNS, str(matrix.device), matrix.dtype, BLOCK["nvfp4"])
    turned: Tensor = matrix.reshape(-1, BLOCK["nvfp4"]) @ basis
    return turned.view(matrix.shape)


def products(
    name: str, x: Tensor, weight: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a Linear layer's output, and the gradients of its input and weight, in a low-precision format.

    Args:
        name: The name of the format.
        x: The input, rows x in_features.
        weight: out_features x in_features.
        grad: The gradient of the output, of shape ``[rows, out_features]``. If ``grad`` is None, only the
            output is computed.
    """

    def rounded(matrix: Tensor, *, is_gradient: bool = False) -> Tensor:
        return quantize(matrix.contiguous(), name, is_gradient=is_gradient)[0]

    output = rounded(x) @ rounded(weight).t()
    if grad is None:
        return output, None, None
    grad_input = rounded(grad, is_gradient=True) @ rounded(weight.t()).t()
    turned = (grad.t().contiguous(), x.t().contiguous())
    if name == "nvfp4":
        turned = (transformed(turned[0]), transformed(turned[1]))
    grad_weight = rounded(turned[0], is_gradient=True) @ rounded(turned[1]).t()
    return output, grad_input, grad_weight


class Rounded(torch.autograd.Function):
    """The autograd Function of a Linear layer without bias. It rounds the operands of all matrix products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Return the layer's output in the dtype of its input."""
        ctx.save_for_backward(x, weight)
        ctx.name = name
        output, *_ = products(name, x.reshape(-1, x.shape[-1]), weight.to(x.dtype), None)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of the input and the weight."""
        x, weight = ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1]).to(x.dtype)
        _, grad_input, grad_weight = products(ctx.name, rows, weight.to(x.dtype), grad)
        assert grad_input is not None  # noqa: S101 - there is a gradient
        assert grad_weight is not None  # noqa: S101
        return grad_input.view(x.shape), grad_weight.to(weight.dtype), None


class EmulatedLinear(nn.Linear):
    """A Linear layer that emulates nvfp4, which torchao cannot emulate.

    The layer computes in the autocast dtype. Outside of autocast, the layer computes in the dtype of its
    input.
    """

    format_name = "nvfp4"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return the output."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))  # noqa: A001
        with torch.autocast(device, enabled=False):
            output: Tensor = Rounded.apply(input, self.weight, self.format_name)  # type: ignore[no-untyped-call, unused-ignore]
        return output if self.bias is None else output + self.bias.to(output.dtype)
