"""Does each format round as torchao's layers do, bit for bit, and as its definition says?"""

import importlib.util
import math

import numpy as np
import pytest
import torch
from torch import nn

from amp_plugin.formats.layers import FORMATS
from amp_plugin.formats.quantizers import EmulatedLinear, products, quantize, transformed
from amp_plugin.hardware import NEEDS
from amp_plugin.precision import BELOW_16_BITS, TRAINING_DTYPES

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao"),
]


def operands(rows=64, inner=64, outer=32, dtype=torch.float32):
    torch.manual_seed(0)
    x, weight, grad = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    x[:, 3] *= 1000  # an outlier channel
    x[5] = 0
    return x.to(dtype), weight.to(dtype), (grad * 1e-3).to(dtype)


def test_the_list_of_formats_is_one() -> None:
    assert [*FORMATS] == [*BELOW_16_BITS]
    assert set(BELOW_16_BITS) <= NEEDS.keys() & TRAINING_DTYPES.keys()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", torch.float32),
        ("fp8-rowwise", torch.float32),
        ("mxfp8", torch.float32),
        ("mxfp8", torch.bfloat16),  # torchao's float8 layers emulate products of bfloat16 in float32
    ],
)
def test_output_and_gradients_have_the_bits_of_torchaos_layers(name, dtype) -> None:
    x, weight, grad = operands(dtype=dtype)
    layer = nn.Linear(64, 32, bias=False, dtype=dtype)
    layer.weight.data.copy_(weight)
    made = FORMATS[name].convert(layer, FORMATS[name].config(None, True))
    leaf = x.clone().requires_grad_()
    output = made(leaf)
    output.backward(grad)
    expected = output.detach(), leaf.grad, made.weight.grad
    torch.testing.assert_close(products(name, x, weight, grad), expected, rtol=0, atol=0)


# -- the formats, by their definitions in float64 --------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def to_e2m1(value: float) -> float:
    """Round to the nearest 4-bit number. In a tie, take the one with an even code."""
    size = min(abs(value), 6.0)
    code = min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
    return math.copysign(E2M1[code], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["x", "weight", "grad", "ties"])
def test_nvfp4_has_the_bits_of_its_definition(which, dtype) -> None:
    """Blocks of 16 have scales in e4m3, below one float32 scale. Numbers are rounded to nearest even.

    Each operation below is one operation of numpy's float32. A number is multiplied by the reciprocal of its scale,
    as in NVIDIA's kernels, and is not divided by it. The comparison has no tolerance.
    """
    x, weight, grad = operands(rows=8)
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 0, 0.5, 1, 2, 3, 4]).expand(2, 16)
    matrix = {"x": x, "weight": weight, "grad": grad, "ties": ties.contiguous()}[which].to(dtype)
    rounded, scales = quantize(matrix, "nvfp4")
    f32, numbers = np.float32, matrix.float().numpy()
    whole = f32(np.abs(numbers).max()) / f32(448.0 * 6.0)
    for row, found in enumerate(rounded.float().numpy()):
        for block in range(matrix.shape[1] // 16):
            part = numbers[row, 16 * block : 16 * block + 16]
            of_block = np.abs(part).max() / f32(6.0) / whole
            of_block = min(max(of_block, f32(torch.finfo(torch.float8_e4m3fn).tiny)), f32(448.0))
            in_e4m3 = f32(torch.tensor(of_block).to(torch.float8_e4m3fn).float().item())
            assert scales[row, block].item() == in_e4m3 * whole
            factor = f32(1.0) / whole / in_e4m3
            expected = [f32(to_e2m1(number * factor)) * (in_e4m3 * whole) for number in part]
            expected = torch.tensor(np.array(expected)).to(dtype).float().numpy()
            assert found[16 * block : 16 * block + 16].tolist() == expected.tolist()


def test_mxfp8_has_power_of_two_scales_that_hold_the_largest_number() -> None:
    """A scale is E8M0: the smallest power of two for which no number of the block exceeds 448."""
    matrix = operands()[0]
    found, scales = quantize(matrix, "mxfp8")
    blocks = matrix.double().view(64, 2, 32)
    amax = blocks.abs().amax(-1)
    expected = torch.exp2(torch.ceil(torch.log2(amax / 448.0))).clamp(min=2.0**-127)
    torch.testing.assert_close(scales.double(), expected, rtol=0, atol=0)
    in_format = (blocks / expected.unsqueeze(-1)).float().to(torch.float8_e4m3fn).double()
    rounded = (in_format * expected.unsqueeze(-1)).view(64, 64)
    torch.testing.assert_close(found.double(), rounded, rtol=0, atol=0)


def test_the_hadamard_transform_keeps_products_and_spreads_outliers() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(4, 64), torch.randn(8, 64)
    torch.testing.assert_close(transformed(first) @ transformed(second).t(), first @ second.t())
    spike = torch.zeros(1, 16)
    spike[0, 5] = 16.0
    assert transformed(spike).abs().tolist() == [[4.0] * 16]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_emulated_layer_trains_in_nvfp4(autocast) -> None:
    x, weight, grad = operands(dtype=torch.bfloat16 if autocast else torch.float32)
    layer = EmulatedLinear(64, 32)
    layer.weight.data.copy_(weight)
    leaf = x.float().requires_grad_() if autocast else x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(leaf)
    output.backward(grad)
    expected = products("nvfp4", x, weight, grad)
    torch.testing.assert_close(output - layer.bias.to(output.dtype), expected[0], rtol=1e-2, atol=1e-2)
    found = leaf.grad.to(x.dtype), layer.weight.grad.to(x.dtype)
    torch.testing.assert_close(found, expected[1:], rtol=0, atol=0)
    exact = grad.float().t() @ x.float()
    assert 0.02 < (layer.weight.grad - exact).norm() / exact.norm() < 0.4
