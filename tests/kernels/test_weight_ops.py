"""The ops on 16-bit weights split every bit pattern exactly, and round without bias."""

import math

import pytest
import torch

from amp_plugin.kernels import ops, reference  # noqa: F401 -- ops defines them
from amp_plugin.kernels.build import native_core

OP = torch.ops.amp_plugin
CHUNK = 32768
SIZES = [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def pair_of(kernel, master):
    high, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    kernel.pack_weights_([master], [high], [low])
    return high, low


def there_and_back(kernel, master):
    high, low = pair_of(kernel, master)
    again = torch.empty_like(master)
    kernel.unpack_weights_([high], [low], [again])
    return high, again


def bits(tensor):
    return tensor.view(torch.int32)


def check_patterns(kernel, first, count):
    """Split and join the bit patterns ``first`` to ``first + count``, and compare the result with the
    original.
    """
    pattern = torch.arange(first, first + count).to(torch.int32)
    master = pattern.view(torch.float32)
    high, again = there_and_back(kernel, master)
    is_nan = master.isnan()
    sign, magnitude = pattern & -(2**31), pattern & 0x7FFFFFFF
    # below 4.6e-41 the high half is zero, so the low half is ignored
    wanted = torch.where(magnitude < 0x8000, sign, pattern)
    assert torch.equal(bits(again)[~is_nan], wanted[~is_nan])
    finite = master.isfinite() & high.isfinite()
    assert ((high.float() - master).abs()[finite] * 2 <= spacing(high)[finite]).all(), "rounded to nearest"
    assert torch.equal(high.isnan(), is_nan)
    assert torch.equal(again.isnan(), is_nan)
    assert torch.equal(again.signbit(), master.signbit())
    changed = bits(again) != wanted
    assert ((bits(again) & 0x7FFFFFFF)[changed] == 0x7FC00000).all()
    return int(changed.sum())


def spacing(high):
    """Return the distance between bfloat16 numbers of this size, as float32.

    It is exact even for the smallest ones.
    """
    exponent = (high.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    smallest = torch.tensor(1 << 16, dtype=torch.int32).view(torch.float32)
    return torch.ldexp(smallest.expand(high.shape), exponent.clamp(min=1) - 1)


def test_both_halves_of_patterns_near_every_edge(kernel):
    changed = 0
    for high in [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]:
        for sign in (0, 0x8000):
            changed += check_patterns(kernel, (sign | high) << 16, 1 << 16)
    assert changed == 2 * (0x7FFF + 0x8000), "the NaNs just above infinity and the topmost ones"


@pytest.mark.slow
@pytest.mark.whole_run
def test_every_bit_pattern_comes_back():
    changed = sum(check_patterns(OP, first, 1 << 24) for first in range(0, 1 << 32, 1 << 24))
    assert changed == 131070


def test_the_documented_values(kernel):
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 1 + 2.0**-8, 1e-45, -0.0, math.inf])
    high, again = there_and_back(kernel, values)
    assert high.tolist()[:2] == [math.inf, -math.inf], "overflow of the half, not of the pair"
    assert again.tolist()[:2] == [largest, -largest]
    assert high[2].item() == 1 + 2.0**-7, "ties away from zero; to bfloat16 they go to even"
    assert again[3].item() == 0, "below 4.6e-41"
    smallest = torch.tensor([2.0**-134, -(2.0**-134)])
    assert torch.equal(there_and_back(kernel, smallest)[1], smallest)
    assert math.copysign(1, again[4].item()) == -1
    device_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert there_and_back(kernel, device_nan)[0].isnan().all(), "CUDA's nan would be -0.0"


def test_beside_a_zero_no_low_half_counts(kernel):
    low = torch.tensor([-32768, -1, 0, 1, 32767], dtype=torch.int16)
    for zero in (0.0, -0.0):
        again = torch.ones(5)
        kernel.unpack_weights_([torch.full((5,), zero, dtype=torch.bfloat16)], [low], [again])
        assert torch.equal(bits(again), bits(torch.full((5,), zero)))


@pytest.mark.parametrize("size", SIZES)
def test_pack_equals_the_reference(size):
    master = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e3
    for ours, plain in zip(pair_of(OP, master), pair_of(reference, master), strict=True):
        assert torch.equal(ours, plain)
        assert ours._version > 0
    assert torch.equal(there_and_back(OP, master)[1], master)


def test_strides_of_all_kinds(kernel):
    base = torch.randn(6, 8)
    masters = [base.t(), base[::2, 1::3], base[0, 0], base[:, 1:3]]
    masters.append(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    high = [torch.empty(m.shape, dtype=torch.bfloat16) for m in masters]
    high[0] = torch.empty(8, 6, 2, dtype=torch.bfloat16)[..., 0]
    low = [torch.empty_like(m, dtype=torch.int16) for m in masters]
    kernel.pack_weights_(masters, high, low)
    again = [torch.full((*m.shape, 2), 7.0)[..., 0] for m in masters]
    kernel.unpack_weights_(high, low, again)
    assert all(map(torch.equal, again, masters))
    rounded = [h.clone() for h in high]
    kernel.round_weights_(masters, rounded, 1, 1)
    contiguous = [torch.empty(m.shape, dtype=torch.bfloat16) for m in masters]
    kernel.round_weights_([m.contiguous() for m in masters], contiguous, 1, 1)
    assert all(map(torch.equal, rounded, contiguous)), "the draw goes with the element, not with its place"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, CHUNK - 1, CHUNK + 9])
def test_stochastic_rounding_equals_the_reference(size):
    masters = [torch.randn(size), torch.randn(3)]
    ours, plain = ([torch.empty_like(m, dtype=torch.bfloat16) for m in masters] for _ in range(2))
    OP.round_weights_(masters, ours, 2**40 + 5, 7)
    reference.round_weights_(masters, plain, 2**40 + 5, 7)
    assert all(map(torch.equal, ours, plain))


def test_stochastic_rounding_is_unbiased_and_seeded(kernel):
    share = 0.3  # fraction of the way to the next bfloat16
    master = torch.full((200_000,), 1 + share * 2.0**-7)

    def rounded(seed, step):
        out = torch.empty_like(master, dtype=torch.bfloat16)
        kernel.round_weights_([master], [out], seed, step)
        return out

    first = rounded(0, 0)
    assert set(first.tolist()) == {1.0, 1 + 2.0**-7}
    up = (first > 1).float().mean().item()
    assert up == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / master.numel()))
    pairs = (first[::2] > 1) & (first[1::2] > 1)
    assert pairs.float().mean().item() == pytest.approx(share**2, abs=0.007), "neighbours are independent"
    assert torch.equal(first, rounded(0, 0))
    for other in (rounded(1, 0), rounded(0, 1)):
        assert (other != first).float().mean().item() == pytest.approx(2 * share * (1 - share), abs=0.01)


def test_stochastic_rounding_keeps_what_is_representable(kernel):
    master = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 2.0**-133])
    out = torch.empty_like(master, dtype=torch.bfloat16)
    for step in range(20):
        kernel.round_weights_([master], [out], 0, step)
        assert torch.equal(out.isnan(), master.isnan())
        assert torch.equal(bits(out.float())[~master.isnan()], bits(master)[~master.isnan()])


def test_results_do_not_depend_on_threads(numbers_of_threads):
    master, results = torch.randn(500_000), []
    for _ in numbers_of_threads:
        out = torch.empty_like(master, dtype=torch.bfloat16)
        OP.round_weights_([master], [out], 3, 4)
        results.append((out, *pair_of(OP, master)))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_opcheck():
    master = torch.randn(5)
    high, low = pair_of(OP, master)
    torch.library.opcheck(OP.pack_weights_.default, ([master], [high], [low]))
    torch.library.opcheck(OP.unpack_weights_.default, ([high], [low], [master]))
    torch.library.opcheck(OP.round_weights_.default, ([master], [high], 1, 2))


def test_errors_name_what_is_wrong(kernel):
    one, half = [torch.ones(2)], [torch.ones(2, dtype=torch.bfloat16)]
    for call, given, error in (
        (kernel.pack_weights_, (one, [], []), "1 masters and 0 high halves; give one for each master"),
        (kernel.unpack_weights_, (half, [], one), "unpack_weights_: 1 masters and 0 low halves"),
        (kernel.round_weights_, (one, half * 2, 0, 0), "round_weights_: 1 masters and 2 outputs"),
    ):
        with pytest.raises(ValueError, match=error):
            call(*given)
    if native_core().loaded and kernel is OP:
        with pytest.raises(ValueError, match="a low half must be Short of the shape of its weight"):
            OP.pack_weights_(one, half, half)
