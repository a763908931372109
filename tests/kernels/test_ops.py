"""The scaling ops on a grid, against float64 and the reference kernels."""

import math

import pytest
import torch

from amp_plugin.kernels import ops, reference
from amp_plugin.kernels.build import native_core

OP = torch.ops.amp_plugin
CHUNK = 32768
SIZES = [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
NORM_TYPES = [2.0, 1.0, math.inf, -math.inf, 0.0, 3.0, 0.5, -1.0]
TOLERANCE = dict.fromkeys(DTYPES, 1e-6)


@pytest.fixture(scope="module", autouse=True)
def native():
    return native_core()


@pytest.fixture(params=["op", "reference"])
def kernel(request):
    """The registered kernels (native ones if there are) and the plain torch ones."""
    return OP if request.param == "op" else reference


def some(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def flat_norm(tensors, p):
    flat = torch.cat([t.to(torch.complex128 if t.is_complex() else torch.float64).flatten() for t in tensors])
    if flat.numel() == 0:
        return 0.0
    return torch.linalg.vector_norm(flat.abs(), p).item()


def same(one, other):
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_the_native_kernels_are_the_ones_tested():
    if not native_core().loaded:
        pytest.skip(native_core().reason)
    for name in ops.SCHEMAS.keys() - {"clip_factor"}:  # three numbers: plain torch does on a CPU
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_plugin::{name}", "CPU"), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norm_and_product(kernel, dtype, size, norm_type):
    grads = some(dtype, (size,), (3,))
    start = [g.clone() for g in grads]
    inv_scale = torch.tensor(2.0**-10)
    right = flat_norm(grads, norm_type) * 2.0**-10
    norms = []
    for write in (False, True):
        norm, found, flags = (kernel.unscale_ if write else kernel.norm_check)(grads, inv_scale, norm_type)
        assert norm.dtype is found.dtype is torch.float32
        assert norm.dim() == found.dim() == 0
        assert norm.item() == pytest.approx(right, rel=TOLERANCE[dtype])
        assert (found.item(), flags.tolist()) == (0.0, [0, 0])
        norms.append(norm.item())
    assert norms[0] == norms[1], "clipping folded and in place give the same bits"
    for grad, before in zip(grads, start, strict=True):
        assert same(grad, (before.to(grad.dtype) * 2.0**-10).to(grad.dtype))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
def test_a_scale_may_be_given_in_place_of_its_inverse(kernel, norm_type, scale_dtype):
    for value in (3.0, 1.0, 1e-3):
        scale = torch.tensor(value, dtype=scale_dtype)
        for name in ("norm_check", "unscale_"):
            ours, theirs = some(torch.float32, (5, 7), (100,)), some(torch.float32, (5, 7), (100,))
            measured = getattr(kernel, name)(ours, scale, norm_type, True)
            right = getattr(kernel, name)(theirs, scale.reciprocal(), norm_type)
            assert all(
                same(mine, other) for mine, other in zip([*measured, *ours], [*right, *theirs], strict=True)
            )


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_norm(kernel, norm_type, dtype):
    grads = some(dtype, (5, 7), (), (100,))
    grads[0][2] = 0
    norm, _, _ = kernel.norm_check(grads, torch.tensor(0.5), norm_type)
    right = flat_norm(grads, norm_type) * (1.0 if norm_type == 0 else 0.5)
    assert norm.item() == pytest.approx(right, rel=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [1, 17, 67])
def test_one_bad_element_anywhere_is_found(kernel, dtype, poison, size):
    flag = reference.NAN_FLAG if math.isnan(poison) else reference.INF_FLAG
    for position in range(size):
        grads = some(dtype, (4,), (size,), (4,))
        grads[1][position] = poison
        norm, found, flags = kernel.norm_check(grads, torch.tensor(0.5))
        assert (found.item(), flags.tolist()) == (1.0, [0, flag, 0])
        assert not norm.isfinite()
        assert kernel.unscale_([g.clone() for g in grads], torch.tensor(0.5))[1].item() == 1.0
        assert kernel.multiply_([g.clone() for g in grads], torch.tensor(0.5)).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_bad_elements_at_chunk_borders(kernel, dtype, offset):
    for poison, flag in ((math.inf, reference.INF_FLAG), (math.nan, reference.NAN_FLAG)):
        (grad,) = some(dtype, (2 * CHUNK + 1,))
        grad[offset] = poison
        assert kernel.norm_check([grad], torch.tensor(1.0))[2].tolist() == [flag]
    both = torch.zeros(CHUNK + 1)
    both[0], both[CHUNK] = math.inf, math.nan
    assert kernel.norm_check([both], torch.tensor(1.0))[2].tolist() == [
        reference.INF_FLAG | reference.NAN_FLAG
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_shapes(kernel, dtype):
    base = some(dtype, (12, 10))[0]
    views = [base.t(), base[::2, 1::3], base[3], base[0, 0], base.flatten()[:0], base.flip(0).t()[2:5]]
    views += [some(dtype, (2, 3, 4, 5))[0].contiguous(memory_format=torch.channels_last)]
    for view in views:
        grads = [view.clone(memory_format=torch.preserve_format)]
        holder = torch.zeros(40 * 40 * 3, dtype=dtype)
        if view.dim() == 2:  # a view with gaps that is written back
            grads = [holder.as_strided(view.shape, (80, 3)).copy_(view)]
        right, before = flat_norm(grads, 2.0), [g.clone() for g in grads]
        norm, _, _ = kernel.unscale_(grads, torch.tensor(0.25))
        assert norm.item() == pytest.approx(right * 0.25, rel=1e-6)
        assert same(grads[0], before[0] * 0.25)
        assert holder.count_nonzero() <= view.numel()


@pytest.mark.parametrize("count", [1, 2, 110, 1000])
def test_many_tensors_of_mixed_dtypes(kernel, count):
    grads = [some(DTYPES[i % 6], (i % 13,), seed=i)[0] for i in range(count)]
    for bad in (0, count // 2, count - 1):
        copies = [g.clone() for g in grads]
        if copies[bad].numel():
            copies[bad][0] = math.nan
        _, found, flags = kernel.norm_check(copies, torch.tensor(1.0))
        assert flags.tolist() == [
            reference.NAN_FLAG if i == bad and g.numel() else 0 for i, g in enumerate(grads)
        ]
        assert found.item() == float(copies[bad].numel() > 0)
    norm, _, _ = kernel.unscale_(grads, torch.tensor(0.5))
    assert norm.item() == pytest.approx(flat_norm(grads, 2.0), rel=1e-2), (
        "rounded in half precision after the norm"
    )


@pytest.mark.parametrize("name", ["norm_check", "unscale_", "multiply_"])
def test_nothing_at_all(kernel, name):
    result = getattr(kernel, name)([], torch.tensor(0.5))
    found = result if name == "multiply_" else result[1]
    assert found.item() == 0.0
    if name != "multiply_":
        assert result[0].item() == 0.0
        assert result[2].shape == (0,)


@pytest.mark.parametrize("name", ["unscale_", "multiply_"])
def test_a_factor_of_one_writes_nothing(name):
    grads = some(torch.float32, (10,))
    version = grads[0]._version
    getattr(OP, name)(grads, torch.tensor(1.0))
    assert grads[0]._version == version
    getattr(OP, name)(grads, torch.tensor(0.5))
    assert grads[0]._version > version


def test_multiply_by_one_does_not_look(kernel):
    assert kernel.multiply_([torch.tensor([math.nan])], torch.tensor(1.0)).item() == 0.0


@pytest.mark.parametrize(
    ("dtype", "big"), [(torch.float32, 3e38), (torch.float16, 60000.0), (torch.float64, 1e308)]
)
def test_a_product_that_overflows_is_found(kernel, dtype, big):
    for call in (kernel.unscale_, kernel.multiply_):
        grads = [torch.full((20,), big, dtype=dtype)]
        result = call(grads, torch.tensor(2.0))
        assert (result if call is kernel.multiply_ else result[1]).item() == 1.0
    assert kernel.norm_check([torch.full((2,), big, dtype=dtype)], torch.tensor(0.5))[1].item() == 0.0


@pytest.mark.parametrize("value", [1e30, 3e37, 1e-25, 1e-38])
@pytest.mark.parametrize("size", [5, CHUNK + 3])
def test_squares_outside_float32(kernel, value, size):
    """Finiteness is asked of the element, and its square may leave float32's range."""
    for call in (kernel.norm_check, kernel.unscale_):
        grads = [torch.full((size,), value)]
        norm, found, _ = call(grads, torch.tensor(0.5))
        right = grads[0].new_full((1,), value).double().item() * 0.5 * math.sqrt(size)
        assert found.item() == 0.0
        representable = right if right <= torch.finfo(torch.float32).max else math.inf
        assert norm.item() == pytest.approx(representable, rel=1e-5, abs=1e-44)


def test_the_norm_is_the_same_with_any_number_of_threads():
    grads = some(torch.float32, (300_000,), (7,), (1_000_000,))
    before = torch.get_num_threads()
    norms = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.append(OP.norm_check(grads, torch.tensor(1.0))[0].item())
    torch.set_num_threads(before)
    assert len(set(norms)) == 1


@pytest.mark.slow
def test_the_norm_of_1e8_elements():
    """torch 2.13's own is wrong by 1 % here."""
    grad = torch.rand(100_000_000).add_(0.5)
    right = math.sqrt(sum(part.double().square().sum().item() for part in grad.split(1_000_000)))
    assert OP.norm_check([grad], torch.tensor(1.0))[0].item() == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_cast(kernel, source, target):
    src = [*some(source, *((s,) for s in SIZES)), some(source, (6, 8))[0].t(), some(source, (6, 8))[0][::2]]
    src[1][0] = 1e6 if source is not torch.float16 else math.inf
    out = [torch.empty(t.shape, dtype=target) for t in src]
    kernel.cast(src, out)
    assert all(same(o, s.to(target)) for s, o in zip(src, out, strict=True))


def test_cast_into_the_same_strides(kernel):
    src = [some(torch.float32, (6, 8))[0].t()]
    out = [torch.empty_like(src[0], dtype=torch.float16)]
    kernel.cast(src, out)
    assert torch.equal(out[0], src[0].half())


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="1 tensors to copy and 0 to write; give one output for each"):
        OP.cast([torch.ones(1)], [])
    with pytest.raises(ValueError, match="1 tensors to copy and 0 to write"):
        reference.cast([torch.ones(1)], [])
    if native_core().loaded:
        with pytest.raises(TypeError, match="of dtype Int are not supported; allowed are float16"):
            OP.norm_check([torch.ones(1, dtype=torch.int32)], torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="inv_scale must have one element on the gradients' device"):
            OP.norm_check([torch.ones(1)], torch.ones(2))
        with pytest.raises(RuntimeError, match="inv_scale must be float32 or float64; got Half"):
            OP.norm_check([torch.ones(1)], torch.ones(1, dtype=torch.float16))


@pytest.mark.parametrize("mode", ops.HYSTERESIS_MODES.values())
def test_update_scale_equals_the_reference(mode):
    def state():
        return torch.tensor(2.0**5), torch.tensor(0, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)

    native, plain = state(), state()
    generator = torch.Generator().manual_seed(mode)
    for _ in range(300):
        found = (torch.rand((), generator=generator) < 0.3).float()
        options = (found, 2.0, 0.5, 3, 0.1, 2.0**10, 2, mode)
        OP.update_scale_(*native, *options)
        reference.update_scale_(*plain, *options)
        assert [x.item() for x in native] == [x.item() for x in plain]


OPCHECKS = {
    "norm_check": (lambda: [torch.randn(5), torch.randn(3).half()], lambda: torch.tensor(0.5)),
    "unscale_": (lambda: [torch.randn(5), torch.randn(3).half()], lambda: torch.tensor(0.5)),
    "multiply_": (lambda: [torch.randn(5)], lambda: torch.tensor(0.5)),
    "cast": (lambda: [torch.randn(5)], lambda: [torch.empty(5, dtype=torch.float16)]),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    first, second = OPCHECKS[name]
    torch.library.opcheck(getattr(OP, name).default, (first(), second()))


def test_opcheck_update_scale():
    counter = torch.zeros((), dtype=torch.int32)
    args = (torch.tensor(8.0), counter, counter.clone(), torch.tensor(1.0), 2.0, 0.5, 3, 1.0, 1e9, 1, 0)
    torch.library.opcheck(OP.update_scale_.default, args)


def test_the_ops_compile():
    def step(grads, inv_scale):
        norm, found, _ = OP.unscale_(grads, inv_scale)
        return norm * 2, found

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    grads, others = some(torch.float32, (5,), (3,)), some(torch.float32, (5,), (3,))
    assert compiled(grads, torch.tensor(0.5)) == step(others, torch.tensor(0.5))
    assert all(map(torch.equal, grads, others))


@pytest.mark.parametrize("norm", [0.0, 0.5, 4.0, math.inf, math.nan])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clip_factor(kernel, norm, scale):
    given = None if scale is None else torch.tensor(scale)
    factor = kernel.clip_factor(torch.tensor(norm), 2.0, given)
    right = min(1.0, 2.0 / (norm + 1e-6)) if math.isfinite(norm) else 1.0
    assert factor.dtype is torch.float32
    assert factor.item() == pytest.approx(right if scale is None else scale / right, rel=1e-6)


def test_opcheck_clip_factor():
    torch.library.opcheck(OP.clip_factor.default, (torch.tensor(3.0), 1.0, torch.tensor(8.0)))
