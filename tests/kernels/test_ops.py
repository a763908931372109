"""The scaling ops on the CPU, in plain torch and on CUDA (real or emulated) agree with float64."""

import itertools
import math

import pytest
import torch

from amp_plugin.kernels import ops, reference
from amp_plugin.kernels.build import native_core

OP = torch.ops.amp_plugin
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
LAYOUTS = ("contiguous", "unaligned", "transposed", "gaps")
NORM_TYPES = (2.0, 1.0, math.inf, -math.inf, 3.0, 0.5, -1.0, 0.0, 2.7, 8.0, 0.25)
NORM_TOLERANCE = 1e-6  # relative, because the result is float32
GUARD = 24  # number of nan elements around a tensor


class Guarded:
    """A tensor surrounded by nans, which ops must neither read nor write."""

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


def grid(dtype, layout, on):
    return [Guarded(random_values(n, dtype, i), layout, on.device) for i, n in enumerate(on.sizes(dtype))]


def tensors(guarded):
    return [one.tensor for one in guarded]


def on_cpu(guarded):
    return [one.tensor.cpu().clone() for one in guarded]


def same(one, other):
    """Return whether tensors are bitwise equal, counting all nans as equal."""
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


def flat_norm(tensors, p):
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64).flatten() for t in tensors]
    return torch.linalg.vector_norm(torch.cat(wide).abs(), p).item()


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_norm_by_float64(on, norm_type, dtype):
    grads = [random_values(n, dtype, n) for n in (35, 1, 100)]
    grads[0][2] = 0
    right = flat_norm(grads, norm_type) * (1.0 if norm_type == 0 else 0.5)
    there, products = [g.to(on.device) for g in grads], [(g * 0.5).to(dtype) for g in grads]
    checked = on.ops.norm_check(there, scalar(0.5, on), norm_type)[0].item()
    written = on.ops.unscale_(there, scalar(0.5, on), norm_type)[0].item()
    assert checked == written == pytest.approx(right, rel=2e-6), "a folded clip gives the same bits"
    assert all(same(one, value) for one, value in zip(there, products, strict=True))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
def test_a_scale_may_be_given_in_place_of_its_inverse(on, norm_type, scale_dtype):
    for value, name in itertools.product((3.0, 1.0, 1e-3), ("norm_check", "unscale_")):
        scale = scalar(value, on, scale_dtype)
        ours, theirs = ([random_values(n, torch.float32).to(on.device) for n in (35, 100)] for _ in range(2))
        measured = getattr(on.ops, name)(ours, scale, norm_type, True)
        right = getattr(on.ops, name)(theirs, scale.reciprocal(), norm_type)
        pairs = zip([*measured, *ours], [*right, *theirs], strict=True)
        assert all(same(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_check_on_the_grid(on, dtype, layout):
    grads = grid(dtype, layout, on)
    inverse = scalar(1 / 3, on)
    before = on_cpu(grads)
    for norm_type in (2.0, math.inf):
        expected = reference.norm_check(before, inverse.cpu(), norm_type)
        check_measured(on.ops.norm_check(tensors(grads), inverse, norm_type), expected)
    for one in tensors(grads):  # each size alone
        expected = reference.norm_check([one.cpu()], inverse.cpu())
        check_measured(on.ops.norm_check([one], inverse), expected)
    assert all(same(one.tensor, old) for one, old in zip(grads, before, strict=True))
    assert all(one.untouched() for one in grads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "factor"), [("unscale_", 1 / 65536), ("unscale_", 1 / 3), ("unscale_", 3.0), ("multiply_", 0.7)]
)
def test_what_is_written_on_the_grid(on, dtype, layout, op, factor):
    grads = grid(dtype, layout, on)
    expected = on_cpu(grads)
    versions = [one._version for one in tensors(grads)]
    got = getattr(on.ops, op)(tensors(grads), scalar(factor, on))
    want = getattr(reference, op)(expected, torch.tensor(factor))
    if op == "unscale_":
        check_measured(got, want)
    else:
        assert (got.item(), want.item(), got.dtype, got.shape) == (0.0, 0.0, torch.float32, ())
    assert all(same(one.tensor, value) for one, value in zip(grads, expected, strict=True))
    assert all(one.untouched() for one in grads)
    assert all(one._version > old for one, old in zip(tensors(grads), versions, strict=True))


@pytest.mark.parametrize("op", ["norm_check", "unscale_"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, -math.inf, 3.0, 0.0, 1.5, -1.0])
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
    chunk = on.chunk(dtype)
    size = 3 * chunk + 3
    for position in (0, chunk - 1, chunk, size // 2, size - 4, size - 1):
        for bad in (math.inf, math.nan):
            values = random_values(size, dtype)
            values[position] = bad
            grads = [torch.ones(5, device=on.device), values.to(on.device), torch.ones(3, device=on.device)]
            _, found_inf, flags = on.ops.norm_check(grads, scalar(1.0, on))
            assert found_inf.item() == 1.0
            assert torch.equal(
                flags.cpu(), reference.norm_check([g.cpu() for g in grads], torch.tensor(1.0))[2]
            )


@pytest.mark.parametrize("sizes", [1, 2, 110, 1000, (300_001, 200_003)], ids=str)
def test_many_and_large_tensors(on, sizes):
    sizes = [1 + 7 * i % 61 for i in range(sizes)] if isinstance(sizes, int) else sizes
    grads = [random_values(n, DTYPES[i % 4], i).to(on.device) for i, n in enumerate(sizes)]
    expected = [grad.cpu().clone() for grad in grads]
    assert len({on.ops.norm_check(grads, scalar(1 / 3, on))[0].item() for _ in range(3)}) == 1
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


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 1.5])
@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-19, 1e-30, 1e-42])
def test_squares_and_sums_beyond_the_range_of_fp32(on, magnitude, p):
    """The elements are finite, although their squares overflow or underflow."""
    values = random_values(4099, torch.float32).sign() * magnitude
    grads = [values.to(on.device), torch.zeros(77, device=on.device), (values[:50] / 2).to(on.device)]
    inverse = scalar(1e-5 if magnitude > 1 else 1e5, on)
    want = reference.norm_check([grad.cpu() for grad in grads], inverse.cpu(), p)
    assert want[0].isfinite()
    assert want[1] == 0
    check_measured(on.ops.norm_check(grads, inverse, p), want)


@pytest.mark.parametrize("p", [3.0, 5.0, 32.0, 0.5, 1.7, 4.0, -0.5, -3.3])
@pytest.mark.parametrize("exponents", [(-20, 20), (-126, -100), (-149, -120), (100, 127)], ids=str)
def test_powers_of_numbers_of_all_sizes(on, exponents, p):
    """The error of the GPU's approximate functions does not grow with the size of an element."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(*exponents, (2000,), generator=generator)
    values = torch.randn(2000, generator=generator).clamp(min=0.01).ldexp(sizes)
    grads = [values[values != 0].to(on.device)]
    want = torch.linalg.vector_norm(grads[0].cpu().double(), p)
    if want > torch.finfo(torch.float32).max or want == 0:
        pytest.skip("the norm is beyond float32, or powers are beyond float64")
    got = on.ops.norm_check(grads, scalar(1.0, on), p)[0]
    torch.testing.assert_close(got.cpu().double(), want, rtol=NORM_TOLERANCE, atol=2.0**-149)


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
        if name == "unscale_" and on.name == "op":  # the op flags only products that are not finite
            assert [part.isnan().item() for part in got[:2]] == [part.isnan().item() for part in want[:2]]
            assert torch.equal(got[2] != 0, want[2] != 0)
        elif name == "unscale_":
            check_measured(got, want)
        else:
            assert got.item() == want.item()
        assert all(same(one, value) for one, value in zip(copies, expected, strict=True))


@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("norm", [0.0, 1.0, 7.0, 1e30, math.inf, math.nan])
def test_a_multiplication_clips_where_a_largest_norm_is_given(on, norm, found):
    if found == 0.0 and math.isnan(norm):
        pytest.skip("finite gradients have no such norm")
    flag = None if found is None else scalar(found, on)
    grads = [
        torch.randn(n, device=on.device).to(dtype) for n, dtype in ((5, torch.float32), (9, torch.float16))
    ]
    clipped, expected = ([grad.clone() for grad in grads] for _ in range(2))
    factor = reference.clip_factor(torch.tensor(norm), 2.0, None, None if flag is None else flag.cpu())
    assert (factor == 1.0).item() is (
        found == 1.0 or norm < 2.0 or (found is None and not math.isfinite(norm))
    )
    got = on.ops.multiply_(clipped, scalar(norm, on), 2.0, flag)
    want = on.ops.multiply_(expected, scalar(factor.item(), on))
    assert got.item() == want.item()
    assert all(same(one, value.cpu()) for one, value in zip(clipped, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_of_one_writes_nothing(on, dtype):
    nan_with_payload = torch.tensor([0x7FA00001, 0x3F800000, 0x7F800000], dtype=torch.int32, device=on.device)
    grads = [nan_with_payload.view(torch.float32).clone()]
    assert on.ops.multiply_(grads, scalar(1.0, on, dtype)).item() == 0.0
    _, found_inf, flags = on.ops.unscale_(grads, scalar(1.0, on, dtype))
    assert (found_inf.item(), flags.item()) == (1.0, 3)
    assert torch.equal(grads[0].view(torch.int32), nan_with_payload)
    if on.name == "op":  # on a GPU, the host does not know that the factor is 1
        assert grads[0]._version == 0


STEPS = list(itertools.product([0.0, 1.0], repeat=6))


@pytest.mark.parametrize("hysteresis_mode", [0, 1, 2])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize(("floor", "ceiling"), [(0.0, math.inf), (0.5, 8.0), (100.0, 0.001)])
def test_update_scale_follows_the_rule(on, hysteresis_mode, hysteresis, floor, ceiling):
    rule = (3.0, 0.3, 2, floor, ceiling, hysteresis, hysteresis_mode)
    for steps in STEPS if on.name == "op" else STEPS[::3]:
        state = [scalar(2.0, on), scalar(0, on, torch.int32), scalar(hysteresis, on, torch.int32)]
        expected = [tensor.cpu().clone() for tensor in state]
        for found in steps:
            on.ops.update_scale_(*state, scalar(found, on), *rule)
            reference.update_scale_(*expected, torch.tensor(found), *rule)
            assert [t.item() for t in state] == [t.item() for t in expected], steps


@pytest.mark.parametrize(
    ("scale", "tracker", "interval", "grown"),
    [(4.0, 25, 3, 8.0), (3e38, 0, 1, 3e38), (2.0**10, 2**31 - 2, 2**40, 2.0**11)],
    ids=["though the interval was lowered", "but never to infinity", "within what an int32 counts to"],
)
def test_update_scale_grows(on, scale, tracker, interval, grown):
    state = [scalar(scale, on), scalar(tracker, on, torch.int32), scalar(1, on, torch.int32)]
    on.ops.update_scale_(*state, scalar(0.0, on), 2.0, 0.5, interval, 0.0, math.inf, 1, 0)
    assert [tensor.item() for tensor in state] == [torch.tensor(grown).item(), 0, 1]


@pytest.mark.parametrize("interval", [2**31 - 1, 2**31, 2**40])
def test_a_long_growth_interval_is_not_over_at_once(on, interval):
    state = [scalar(4.0, on), scalar(0, on, torch.int32), scalar(1, on, torch.int32)]
    for _ in range(2):
        on.ops.update_scale_(*state, scalar(0.0, on), 2.0, 0.5, interval, 0.0, math.inf, 1, 0)
    assert [tensor.item() for tensor in state] == [4.0, 2, 1]


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


JUDGED = {  # value, norm and found_inf of each step of a run
    "a quiet run": [(1.0 + 0.1 * (i % 5), 1.0, 0.0) for i in range(20)],
    "a spike": [(1.0 + 0.1 * (i % 5) + 30.0 * (i == 12), 30.0, 0.0) for i in range(20)],
    "a new level": [(1.0 + 0.1 * (i % 5) + 10.0 * (i >= 9), 2.0, 0.0) for i in range(40)],
    "overflows": [(math.inf if i % 7 == 6 else 1.0, math.inf, float(i % 7 == 6)) for i in range(20)],
    "a value that is not finite": [
        ((math.nan, math.inf)[i % 2] if i in {3, 12} else -1.0 - i / 9, 1.0, 0.0) for i in range(20)
    ],
    "a constant": [(-2.0, 2.0, 0.0)] * 12 + [(-1.5, 1.0, 0.0), (-1.99, 1.0, 0.0)],
    "an overflow among spikes": [(1.0 + 50.0 * (i > 8), 50.0, float(i == 11)) for i in range(16)],
}


@pytest.mark.parametrize("action", ops.SPIKE_ACTIONS)
@pytest.mark.parametrize("run", JUDGED)
def test_judge_step_follows_the_rule(on, run, action):
    rule = (6.0, 8, 4, 0.01, ops.SPIKE_ACTIONS[action])
    state = [torch.zeros(4, device=on.device), scalar(5, on, torch.int32), scalar(9, on, torch.int32)]
    expected = [tensor.cpu().clone() for tensor in state]
    codes = []
    for value, norm, found in JUDGED[run]:
        parts = [scalar(value - 0.5, on), scalar(0.5, on, torch.float64)]
        got = on.ops.judge_step_(parts, scalar(norm, on), scalar(found, on), state[0], state[1:], *rule)
        want = reference.judge_step_(
            [part.cpu() for part in parts], torch.tensor(norm), torch.tensor(found), expected[0],
            expected[1:], *rule
        )  # fmt: skip
        assert (got.shape, got.dtype, got.device) == ((6,), torch.float32, state[0].device)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0.0, equal_nan=True)
        torch.testing.assert_close(state[0].cpu(), expected[0], rtol=1e-5, atol=1e-6)
        assert [tracker.item() for tracker in state[1:]] == [tracker.item() for tracker in expected[1:]]
        codes.append(int(got[2].item()))
    assert any(codes) == (run not in {"a quiet run", "overflows"}), codes


def test_the_statistics_are_mean_and_deviation_of_the_values():
    values = torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    statistics, zero = torch.zeros(4), torch.zeros(())
    for value in values:
        reference.judge_step_([value], zero, zero, statistics, [], 6.0, 32, 4, 0.5, 0)
    right = torch.stack([values.mean(), values.var(correction=0)])
    torch.testing.assert_close(statistics[:2].double(), right, rtol=1e-5, atol=1e-6)
    assert statistics[2:].tolist() == [20.0, 0.0]


@pytest.mark.parametrize("count", [0, 1, 32, 33])
def test_judge_step_adds_up_any_number_of_values(on, count):
    statistics, zero = torch.zeros(4, device=on.device), scalar(0.0, on)
    trackers = [scalar(i, on, torch.int32) for i in range(count)]
    values = [scalar(1.0, on) for _ in range(max(1, count))]
    judged = on.ops.judge_step_(values, zero, zero, statistics, trackers, 6.0, 8, 4, 0.5, 0)
    assert statistics[0].item() == max(1, count)
    assert judged.tolist() == [0.0, 1.0, 0.0, max(1, count), torch.finfo(torch.float32).max, 0.0]


def numbers(device, *dtypes):
    return [torch.ones((), device=device, dtype=dtype) for dtype in dtypes]


RULE = (2.0, 0.5, 3, 1.0, 1e9, 1, 0)
F32, F16, I32 = torch.float32, torch.float16, torch.int32
NO_NUMBER = "inv_scale: got a tensor of .* give one element of Float or Double on cuda:0"
NO_COUNTER = "update_scale_: got a tensor of 1 elements, Float, on cuda:0; give one element of Int on"
REFUSED = [
    ("cpu", "norm_check", lambda on: (numbers(on, F32), torch.ones(2)), ValueError, "inv_scale: got a tensor of 2 elements, Float, on cpu; give one"),
    ("cpu", "norm_check", lambda on: (numbers(on, F32), *numbers(on, F16)), ValueError, "1 elements, Half, on cpu; give one element of Float or Double"),
    ("cpu", "norm_check", lambda on: (numbers(on, I32), *numbers(on, F32)), TypeError, "dtype Int are not supported; allow"),
    ("cuda", "norm_check", lambda on: (numbers(on, F32), torch.ones(2, device=on)), ValueError, NO_NUMBER),
    ("cuda", "norm_check", lambda on: (numbers(on, F32), *numbers(on, I32)), ValueError, NO_NUMBER),
    ("cuda", "norm_check", lambda on: (numbers(on, F32, I32), *numbers(on, F32)), TypeError, "tensor 1 of 2: the CUDA ker"),
    ("cuda", "norm_check", lambda on: ([*numbers(on, F32), torch.ones(3)], *numbers(on, F32)), ValueError, "tensor 1 of 2 is not on cuda:0, where the scale is"),
    ("cuda", "update_scale_", lambda on: (*numbers(on, F32, F32, I32, F32), *RULE), ValueError, NO_COUNTER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "given", "error", "text"), REFUSED)
def test_errors_name_what_is_wrong(on, kind, name, given, error, text):
    if on.device.type != kind or on.name == "reference" or not native_core().loaded:
        pytest.skip("others say it in their own words")
    with pytest.raises(error, match=text):
        getattr(on.ops, name)(*given(on.device))


def test_gradients_made_in_inference_mode(on):
    with torch.inference_mode():
        grads = [torch.ones(9, device=on.device)]
        on.ops.unscale_(grads, scalar(0.5, on))
        assert (grads[0] == 0.5).all()


def test_the_native_kernels_are_the_ones_tested():
    if not native_core().loaded:
        pytest.skip(native_core().reason)
    # three numbers, for which plain torch is enough on a CPU
    for name in ops.SCHEMAS.keys() - {"clip_factor"}:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_plugin::{name}", "CPU"), name


def test_the_norm_is_the_same_with_any_number_of_threads(numbers_of_threads):
    grads = [random_values(n, torch.float32) for n in (300_000, 7, 1_000_000)]
    assert len({OP.norm_check(grads, torch.tensor(1.0))[0].item() for _ in numbers_of_threads}) == 1


@pytest.mark.slow
def test_the_norm_of_1e8_elements():
    """torch 2.13's own norm is wrong by 1 % here."""
    grad = torch.rand(100_000_000).add_(0.5)
    right = math.sqrt(sum(part.double().square().sum().item() for part in grad.split(1_000_000)))
    assert OP.norm_check([grad], torch.tensor(1.0))[0].item() == pytest.approx(right, rel=1e-6)


GRADS = [torch.randn(5), torch.randn(3).half()]
COUNTER = torch.zeros((), dtype=torch.int32)
OPCHECKS = {
    "norm_check": (GRADS, torch.tensor(0.5)),
    "unscale_": (GRADS, torch.tensor(0.5)),
    "multiply_": (GRADS, torch.tensor(0.5)),
    "update_scale_": (torch.tensor(8.0), COUNTER, COUNTER.clone(), torch.tensor(1.0), *RULE),
    "clip_factor": (torch.tensor(3.0), 1.0, torch.tensor(8.0)),
    "judge_step_": (
        [torch.tensor(3.0)],
        torch.tensor(3.0),
        torch.tensor(0.0),
        torch.zeros(4),
        [COUNTER.clone()],
        6.0,
        8,
        4,
        0.5,
        1,
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    torch.library.opcheck(getattr(OP, name).default, OPCHECKS[name])
