"""The CUDA kernels against plain torch: on a GPU, or emulated on the device made of host memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from amp_plugin.kernels import ops, reference  # noqa: F401 - defines torch.ops.amp_plugin
from amp_plugin.kernels.cuda.register import cuda_core
from tests.host_device import host_device

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
LAYOUTS = ("contiguous", "unaligned", "transposed", "gaps")
NORM_TYPES = (2.0, 1.0, math.inf, -math.inf, 3.0, 0.5, -1.0, 0.0)
GRANULE = 4096  # kGranuleBytes
NORM_TOLERANCE = 1e-6  # relative; the result is fp32
GUARD = 24  # elements around a tensor, all nan


@dataclass
class Device:
    device: torch.device
    ops: object = torch.ops.amp_plugin


@pytest.fixture(scope="module", params=["ascending", "descending"])
def on(request):
    """The kernels on a GPU, or emulated with threads and blocks in either order."""
    if host_device.LOADED:
        torch.ops.host_device.descending(request.param == "descending")
    elif request.param == "descending":
        pytest.skip("a GPU chooses the order itself")
    core = cuda_core(0)
    assert core.loaded, core.reason
    yield Device(torch.device("cuda", 0))
    if host_device.LOADED:
        torch.ops.host_device.descending(False)


def sizes_of(dtype):
    chunk = GRANULE // dtype.itemsize
    return (0, 1, 15, 16, 17, chunk - 1, chunk, chunk + 1)


class Guarded:
    """A tensor in the midst of nan, which nobody may read and nobody may write."""

    def __init__(self, values: torch.Tensor, layout: str, device: torch.device) -> None:
        size, dtype = values.numel(), values.dtype
        step = 2 if layout == "gaps" else 1
        offset = GUARD + (layout == "unaligned")
        self.buffer = torch.full((2 * GUARD + 2 + size * step,), math.nan, dtype=dtype, device=device)
        inside = torch.zeros(self.buffer.shape, dtype=torch.bool)
        inside[offset : offset + size * step : step] = True
        self.outside = ~inside.to(device)
        self.tensor = self.buffer[offset : offset + size * step : step]
        if layout == "transposed" and size % 2 == 0 and size:
            self.tensor = self.tensor.view(2, -1).t()
            assert size == 2 or not self.tensor.is_contiguous()
        self.tensor.copy_(values.to(device).reshape(self.tensor.shape))

    def untouched(self) -> bool:
        return bool(self.buffer[self.outside].isnan().all())


def random_values(size, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed * 7919 + size)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(size, dtype=wide, generator=generator) * scale).to(dtype)


def grid(dtype, layout, device, scale=1.0):
    return [Guarded(random_values(n, dtype, i, scale), layout, device) for i, n in enumerate(sizes_of(dtype))]


def tensors(guarded):
    return [one.tensor for one in guarded]


def on_cpu(guarded):
    return [one.tensor.cpu().clone() for one in guarded]


def same(one, other):
    """Equal bit for bit, but that one nan is as good as another."""
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one.cpu(), other.cpu()))
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def check_measured(got, expected):
    norm, found_inf, flags = (part.cpu() for part in got)
    assert norm.dtype == found_inf.dtype == torch.float32
    assert norm.shape == found_inf.shape == ()
    torch.testing.assert_close(norm, expected[0], rtol=NORM_TOLERANCE, atol=0.0, equal_nan=True)
    assert found_inf.item() == expected[1].item()
    assert torch.equal(flags, expected[2])


def scalar(value, on, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=on.device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_check_on_the_grid(on, dtype, layout):
    grads = grid(dtype, layout, on.device)
    inverse = scalar(1 / 3, on)
    before = on_cpu(grads)
    for norm_type in (2.0, math.inf):
        expected = reference.norm_check(before, inverse.cpu(), norm_type)
        check_measured(on.ops.norm_check(tensors(grads), inverse, norm_type), expected)
    for one in tensors(grads):  # each size by itself
        expected = reference.norm_check([one.cpu()], inverse.cpu())
        check_measured(on.ops.norm_check([one], inverse), expected)
    assert all(same(one.tensor, old) for one, old in zip(grads, before, strict=True))
    assert all(one.untouched() for one in grads)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
def test_every_norm_of_mixed_dtypes(on, norm_type, scale_dtype):
    grads = [
        Guarded(random_values(n, dtype, n), "unaligned", on.device) for dtype in DTYPES for n in (0, 3, 130)
    ]
    inverse = scalar(-0.3, on, scale_dtype)
    expected = reference.norm_check(on_cpu(grads), inverse.cpu(), norm_type)
    check_measured(on.ops.norm_check(tensors(grads), inverse, norm_type), expected)
    expected = reference.unscale_(on_cpu(grads), inverse.cpu(), norm_type)
    check_measured(on.ops.unscale_(tensors(grads), inverse, norm_type), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1 / 65536, 1 / 3, 3.0])
def test_unscale_on_the_grid(on, dtype, layout, factor):
    grads = grid(dtype, layout, on.device)
    expected = on_cpu(grads)
    versions = [one._version for one in tensors(grads)]
    inverse = scalar(factor, on)
    check_measured(on.ops.unscale_(tensors(grads), inverse), reference.unscale_(expected, inverse.cpu()))
    assert all(same(one.tensor, value) for one, value in zip(grads, expected, strict=True))
    assert all(one.untouched() for one in grads)
    assert all(one._version > old for one, old in zip(tensors(grads), versions, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiply_on_the_grid(on, dtype, layout):
    grads = grid(dtype, layout, on.device)
    expected = on_cpu(grads)
    versions = [one._version for one in tensors(grads)]
    found = on.ops.multiply_(tensors(grads), scalar(0.7, on))
    assert found.item() == reference.multiply_(expected, torch.tensor(0.7)).item() == 0.0
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert all(same(one.tensor, value) for one, value in zip(grads, expected, strict=True))
    assert all(one.untouched() for one in grads)
    assert all(one._version > old for one, old in zip(tensors(grads), versions, strict=True))


@pytest.mark.parametrize("op", ["norm_check", "unscale_"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, -math.inf, 3.0, 0.0])
def test_one_bad_element_at_each_position_is_flagged(on, op, norm_type):
    size = 37
    bad = (math.inf, -math.inf, math.nan)
    grads = []
    for i, (dtype, position) in enumerate(itertools.product(DTYPES, range(size))):
        values = random_values(size, dtype, i)
        parts = torch.view_as_real(values).view(-1) if dtype.is_complex else values
        parts[position * (len(parts) // size) + i % (len(parts) // size)] = bad[i % 3]
        grads.append(Guarded(values, LAYOUTS[i % 2], on.device))
    grads.append(Guarded(random_values(size, torch.float32), "contiguous", on.device))
    expected = on_cpu(grads)
    want = getattr(reference, op)(expected, torch.tensor(0.5), norm_type)
    assert (want[2][:-1] != 0).all()
    assert want[2][-1] == 0
    check_measured(getattr(on.ops, op)(tensors(grads), scalar(0.5, on), norm_type), want)
    assert all(same(one.tensor, value) for one, value in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_element_in_any_chunk_is_flagged(on, dtype):
    size = 5 * GRANULE // dtype.itemsize + 3
    for position in (0, GRANULE // dtype.itemsize, size // 2, size - 4, size - 1):
        for bad in (math.inf, math.nan):
            values = random_values(size, dtype)
            values[position] = bad
            grads = [torch.ones(5, device=on.device), values.to(on.device), torch.ones(3, device=on.device)]
            _, found_inf, flags = on.ops.norm_check(grads, scalar(1.0, on))
            assert found_inf.item() == 1.0
            assert torch.equal(
                flags.cpu(), reference.norm_check([g.cpu() for g in grads], torch.tensor(1.0))[2]
            )


@pytest.mark.parametrize("count", [1, 2, 110, 1000])
def test_many_tensors(on, count):
    dtypes = DTYPES[:4]
    grads = [random_values(1 + 7 * i % 61, dtypes[i % 4], i).to(on.device) for i in range(count)]
    expected = [grad.cpu().clone() for grad in grads]
    want = reference.unscale_(expected, torch.tensor(0.1))
    check_measured(on.ops.unscale_(grads, scalar(0.1, on)), want)
    assert all(same(one, value) for one, value in zip(grads, expected, strict=True))


def test_no_tensors_and_empty_tensors(on):
    for grads in ([], [torch.empty(0, device=on.device)] * 3):
        for op in (on.ops.norm_check, on.ops.unscale_):
            for norm_type in (2.0, -math.inf):
                norm, found_inf, flags = op(grads, scalar(0.5, on), norm_type)
                assert norm.item() == found_inf.item() == 0.0
                assert flags.tolist() == [0] * len(grads)
        assert on.ops.multiply_(grads, scalar(0.5, on)).item() == 0.0
        on.ops.cast(grads, [grad.clone() for grad in grads])


@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-19, 1e-30, 1e-42])
def test_squares_beyond_the_range_of_fp32(on, magnitude):
    """The element is finite though its square is not, or is lost."""
    values = random_values(4099, torch.float32).sign() * magnitude
    grads = [values.to(on.device), torch.zeros(77, device=on.device), (values[:50] / 2).to(on.device)]
    inverse = scalar(1e-5 if magnitude > 1 else 1e5, on)
    want = reference.norm_check([grad.cpu() for grad in grads], inverse.cpu())
    assert want[1] == 0
    check_measured(on.ops.norm_check(grads, inverse), want)


def test_sums_of_magnitudes_beyond_the_range_of_fp32(on):
    grads = [torch.full((100,), 3e38, device=on.device)]
    want = reference.norm_check([grads[0].cpu()], torch.tensor(1e-5), 1.0)
    check_measured(on.ops.norm_check(grads, scalar(1e-5, on), 1.0), want)
    assert want[0].isfinite()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_product_that_overflows_is_found(on, dtype):
    largest = torch.finfo(dtype).max
    grads = [
        torch.full((n,), value, dtype=dtype, device=on.device) for n, value in ((20, 1.0), (40, largest / 2))
    ]
    for op, plain in ((on.ops.unscale_, reference.unscale_), (on.ops.norm_check, reference.norm_check)):
        copies, expected = [g.clone() for g in grads], [g.cpu().clone() for g in grads]
        check_measured(op(copies, scalar(4.0, on)), plain(expected, torch.tensor(4.0)))
        assert all(same(one, value) for one, value in zip(copies, expected, strict=True))
    assert on.ops.multiply_(grads, scalar(4.0, on)).item() == 1.0
    assert grads[1].isinf().all()


@pytest.mark.parametrize("factor", [math.inf, math.nan, 0.0])
def test_a_factor_that_is_not_finite_or_zero(on, factor):
    values = torch.tensor([1.0, 0.0, math.inf, -2.0, math.nan])
    only_inf = torch.full((9,), math.inf, device=on.device)
    grads = [values.to(on.device), torch.ones(30, device=on.device), only_inf]
    for name in ("unscale_", "multiply_"):
        copies, expected = [g.clone() for g in grads], [g.cpu().clone() for g in grads]
        got = getattr(on.ops, name)(copies, scalar(factor, on))
        want = getattr(reference, name)(expected, torch.tensor(factor))
        if name == "unscale_":
            check_measured(got, want)
        else:
            assert got.item() == want.item()
        assert all(same(one, value) for one, value in zip(copies, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_of_one_writes_nothing(on, dtype):
    nan_with_payload = torch.tensor([0x7FA00001, 0x3F800000, 0x7F800000], dtype=torch.int32, device=on.device)
    grads = [nan_with_payload.view(torch.float32).clone()]
    assert on.ops.multiply_(grads, scalar(1.0, on, dtype)).item() == 0.0
    _, found_inf, flags = on.ops.unscale_(grads, scalar(1.0, on, dtype))
    assert (found_inf.item(), flags.item()) == (1.0, 3)
    assert torch.equal(grads[0].view(torch.int32), nan_with_payload)


def test_results_are_the_same_in_every_run(on):
    grads = [random_values(300_000, torch.float32, 1, 10.0).to(on.device), torch.ones(7, device=on.device)]
    norms = {on.ops.norm_check(grads, scalar(1 / 3, on))[0].item() for _ in range(3)}
    assert len(norms) == 1


def test_large_tensors_of_several_chunks(on):
    grads = [
        random_values(n, dtype, 3).to(on.device) for n, dtype in ((300_001, DTYPES[2]), (200_003, DTYPES[0]))
    ]
    expected = [grad.cpu().clone() for grad in grads]
    check_measured(on.ops.unscale_(grads, scalar(0.3, on)), reference.unscale_(expected, torch.tensor(0.3)))
    assert all(same(one, value) for one, value in zip(grads, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES[:4], repeat=2)), ids=str)
def test_cast_on_the_grid(on, source, target, layout):
    sizes = sorted({*sizes_of(source), *sizes_of(target)})
    guarded = [Guarded(random_values(n, source, n, 100.0), layout, on.device) for n in sizes]
    out = [Guarded(torch.zeros(n, dtype=target), layout, on.device) for n in sizes]
    on.ops.cast(tensors(guarded), tensors(out))
    for one, other in zip(guarded, out, strict=True):
        assert same(other.tensor, one.tensor.cpu().to(target))
        assert other.untouched()


@pytest.mark.parametrize("target", DTYPES[:3], ids=str)
def test_casts_round_to_nearest_even(on, target):
    every_half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = torch.cat([every_half.view(torch.float16).float(), every_half.view(torch.bfloat16).float()])
    words = torch.randint(-(2**31), 2**31 - 1, (2**16,), generator=torch.Generator().manual_seed(0))
    between = torch.cat(
        [halves.view(torch.int32) + d for d in (-1, 0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000)]
    )
    values = torch.cat([words.to(torch.int32), between]).view(torch.float32).to(on.device)
    for source in (values, values.to(torch.float16), values.to(torch.bfloat16)):
        out = torch.empty(source.shape, dtype=target, device=on.device)
        on.ops.cast([source], [out])
        assert same(out, source.cpu().to(target))


def test_cast_leaves_to_torch_what_it_cannot_do(on):
    complex_one = torch.randn(9, dtype=torch.complex64, device=on.device)
    grid_of_six = torch.arange(6.0, device=on.device).view(2, 3)
    src = [complex_one, grid_of_six, torch.arange(3, device=on.device), torch.ones(5, device=on.device)]
    out = [
        torch.zeros(9, dtype=torch.complex128, device=on.device),
        torch.zeros(3, 2, dtype=torch.float16, device=on.device).t(),
        torch.zeros(3, device=on.device),
        torch.zeros(5, dtype=torch.bfloat16, device=on.device),
    ]
    versions = [one._version for one in out]
    on.ops.cast(src, out)
    assert all(torch.equal(other, one.to(other.dtype)) for one, other in zip(src, out, strict=True))
    assert all(one._version > old for one, old in zip(out, versions, strict=True))


STEPS = list(itertools.product([0.0, 1.0], repeat=6))


@pytest.mark.parametrize("hysteresis_mode", [0, 1, 2])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize(("floor", "ceiling"), [(0.0, math.inf), (0.5, 8.0), (100.0, 0.001)])
def test_update_scale_follows_the_rule(on, hysteresis_mode, hysteresis, floor, ceiling):
    rule = (3.0, 0.3, 2, floor, ceiling, hysteresis, hysteresis_mode)
    for steps in STEPS[::3] if host_device.LOADED else STEPS:
        state = [scalar(2.0, on), scalar(0, on, torch.int32), scalar(hysteresis, on, torch.int32)]
        expected = [tensor.cpu().clone() for tensor in state]
        for found in steps:
            on.ops.update_scale_(*state, scalar(found, on), *rule)
            reference.update_scale_(*expected, torch.tensor(found), *rule)
            assert [t.item() for t in state] == [t.item() for t in expected], steps


def test_update_scale_grows_though_the_interval_was_lowered(on):
    state = [scalar(4.0, on), scalar(25, on, torch.int32), scalar(1, on, torch.int32)]
    on.ops.update_scale_(*state, scalar(0.0, on), 2.0, 0.5, 3, 0.0, math.inf, 1, 0)
    assert [tensor.item() for tensor in state] == [8.0, 0, 1]


def test_update_scale_never_grows_to_infinity(on):
    state = [scalar(3e38, on), scalar(0, on, torch.int32), scalar(1, on, torch.int32)]
    on.ops.update_scale_(*state, scalar(0.0, on), 2.0, 0.5, 1, 0.0, math.inf, 1, 0)
    assert state[0].item() == torch.tensor(3e38).item()
    assert state[1].item() == 0


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 2.5])
def test_clip_factor_follows_the_formula(on, norm, max_norm):
    for scale in (None, 65536.0, 3.0):
        tensor = None if scale is None else scalar(scale, on)
        want = reference.clip_factor(torch.tensor(norm), max_norm, None if scale is None else tensor.cpu())
        got = on.ops.clip_factor(scalar(norm, on), max_norm, tensor)
        assert (got.shape, got.dtype) == ((), torch.float32)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0.0)
        if scale is None:
            formula = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
            assert want.item() == pytest.approx(formula, rel=1e-6)


def test_a_scale_that_cannot_be_read_is_refused(on):
    grads = [torch.ones(3, device=on.device)]
    for bad in (torch.ones(2, device=on.device), torch.ones((), dtype=torch.int32, device=on.device)):
        with pytest.raises(
            ValueError, match=r"inv_scale: got a tensor of .* give one element of Float or Double on cuda:0"
        ):
            on.ops.norm_check(grads, bad)
    state = [scalar(1.0, on), scalar(0, on, torch.int64), scalar(1, on, torch.int32)]
    with pytest.raises(
        ValueError,
        match=r"update_scale_: got a tensor of 1 elements, Long, on cuda:0; give one element of Int on",
    ):
        on.ops.update_scale_(*state, scalar(0.0, on), 2.0, 0.5, 1, 0.0, 1.0, 1, 0)


def test_dtypes_without_a_kernel_are_refused(on):
    with pytest.raises(TypeError, match="tensor 1 of 2: the CUDA kernels take float16, bfloat16, float32"):
        on.ops.norm_check(
            [torch.ones(3, device=on.device, dtype=t) for t in (torch.float32, torch.int32)], scalar(1.0, on)
        )


def test_a_cast_needs_one_output_for_each_input(on):
    with pytest.raises(ValueError, match="cast: 1 tensors to copy and 0 to write"):
        on.ops.cast([torch.ones(3, device=on.device)], [])


def test_gradients_made_in_inference_mode(on):
    with torch.inference_mode():
        grads = [torch.ones(9, device=on.device)]
        on.ops.unscale_(grads, scalar(0.5, on))
        assert (grads[0] == 0.5).all()
