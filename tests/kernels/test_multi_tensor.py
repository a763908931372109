"""The ops on torch's multi-tensor kernels against the plain ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_plugin.kernels import multi_tensor, reference

SHORT = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(device, dtypes=SHORT, bad=()):
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 15, 16, 17, 1023, 1024, 1025)
    made = [torch.randn(size, generator=generator).to(dtype) for size in sizes for dtype in dtypes]
    made.append(torch.randn(6, 4, generator=generator).t())
    made.append(torch.randn(8, 4, generator=generator)[::2])
    for i, value in bad:
        made[i].view(-1)[0] = value
    return [grad.to(device) for grad in made]


def same(one, other):
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def check(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0.0, equal_nan=True)
    assert got[0].dtype == torch.float32
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, -math.inf, 3.0, 0.0])
@pytest.mark.parametrize("bad", [(), ((5, math.inf), (9, math.nan), (12, -math.inf))], ids=["finite", "bad"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
def test_measuring_and_unscaling(device, norm_type, bad, scale_dtype):
    inverse = torch.tensor(1 / 3, dtype=scale_dtype, device=device)
    for op in ("norm_check", "unscale_"):
        ours, plain = gradients(device, bad=bad), gradients(device, bad=bad)
        check(
            getattr(multi_tensor, op)(ours, inverse, norm_type),
            getattr(reference, op)(plain, inverse, norm_type),
        )
        assert all(same(mine, other) for mine, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2.0, 3.0])
def test_a_scale_in_place_of_its_inverse(device, norm_type):
    scale = torch.tensor(3.0, device=device)
    for op in ("norm_check", "unscale_"):
        ours, plain = gradients(device), gradients(device)
        check(
            getattr(multi_tensor, op)(ours, scale, norm_type, True),
            getattr(multi_tensor, op)(plain, scale.reciprocal(), norm_type),
        )
        assert all(same(mine, other) for mine, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [0.7, 1.0, 1e30])
def test_multiplying(device, factor):
    ours, plain = gradients(device), gradients(device)
    factor = torch.tensor(factor, device=device)
    assert multi_tensor.multiply_(ours, factor).item() == reference.multiply_(plain, factor).item()
    assert all(same(mine, other) for mine, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_that_overflows_is_found(device):
    grads = [torch.ones(3, device=device), torch.full((3,), 3e38, device=device)]
    _, found, flags = multi_tensor.unscale_(grads, torch.tensor(4.0, device=device))
    assert (found.item(), flags.tolist()) == (1.0, [0, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_casting(device):
    for target in SHORT:
        ours = [torch.empty_like(grad, dtype=target) for grad in gradients(device)]
        multi_tensor.cast(gradients(device), ours)
        assert all(same(mine, g.to(target)) for mine, g in zip(ours, gradients(device), strict=True))
    with pytest.raises(ValueError, match="cast: 1 tensors to copy and 0 to write"):
        multi_tensor.cast(gradients(device)[:1], [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_what_float64_does_not_hold_is_done_one_by_one(dtype):
    grads = [torch.full((3,), 1e200 if dtype is torch.float64 else 1e30, dtype=dtype), torch.ones(2)]
    inverse = torch.tensor(0.5)
    check(multi_tensor.norm_check(grads, inverse), reference.norm_check(grads, inverse))
    check(
        multi_tensor.unscale_([g.clone() for g in grads], inverse),
        reference.unscale_([g.clone() for g in grads], inverse),
    )


@pytest.mark.parametrize("grads", [[], [torch.empty(0)] * 3], ids=["none", "empty"])
def test_nothing_to_measure(grads):
    for op in (multi_tensor.norm_check, multi_tensor.unscale_):
        norm, found, flags = op(grads, torch.tensor(0.5))
        assert (norm.item(), found.item(), flags.tolist()) == (0.0, 0.0, [0] * len(grads))
    assert multi_tensor.multiply_(grads, torch.tensor(0.5)).item() == 0.0


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["norm_check", "unscale_", "multiply_"])
def test_the_number_of_calls_does_not_grow_with_the_tensors(op):
    counts = []
    for tensors in (2, 200):
        grads = [torch.ones(5) for _ in range(tensors)]
        with Calls() as calls:
            getattr(multi_tensor, op)(grads, torch.tensor(0.5))
        counts.append(calls.count)
    assert counts[0] == counts[1] < 40
