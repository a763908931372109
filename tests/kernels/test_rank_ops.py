"""The numbers that ranks combine are packed by one op and unpacked by another, on each device and in plain
torch.
"""

import math

import pytest
import torch

from amp_plugin.kernels import ops, reference  # noqa: F401 - defines torch.ops.amp_plugin
from tests.host_device import host_device

OP = torch.ops.amp_plugin
NORM_TYPES = (2.0, 1.0, math.inf, -math.inf, 0.0, 3.0, 0.5, -1.0)
MANY = 40  # more than fit into one launch


def tensors(values, device):
    return [torch.tensor(value, device=device) for value in values]


def combined(on, norms, flags, slots, replicas, p, ranks=1):
    """Simulate several ranks that combine the same measurements."""
    packed = torch.empty(len(replicas) + 1, dtype=torch.float64, device=on.device)
    on.ops.pack_measurements_(
        packed, tensors(norms, on.device), tensors(flags, on.device), slots, replicas, p
    )
    if not math.isinf(p):
        packed *= ranks
    norm, found = on.ops.unpack_measurements([packed], p)
    assert norm.dtype is found.dtype is torch.float32
    assert norm.shape == found.shape == ()
    return norm.item(), found.item()


def norm_of(norms, p):
    if p == 0:
        return sum(norms)  # for p = 0, norms are counts
    if math.isinf(p):
        return (max if p > 0 else min)(norms)
    return sum(norm**p for norm in norms) ** (1 / p)


@pytest.mark.parametrize("p", NORM_TYPES)
def test_norms_of_several_ranks_and_layouts_are_joined(on, p):
    norms, flags = [3.0, 4.0, 0.5], [0.0, 1.0, 0.0]
    assert combined(on, norms[:1], flags[:1], [0], [1], p) == (pytest.approx(3.0, rel=1e-6), 0.0)
    norm, found = combined(on, norms, flags, [1, 0, 1], [1, 1], p)
    assert (norm, found) == (pytest.approx(norm_of(norms, p), rel=1e-6), 1.0)
    # four ranks with the same gradients
    everywhere = combined(on, norms, [0.0] * 3, [0, 1, 0], [4, 4], p, ranks=4)
    assert everywhere == (pytest.approx(norm_of(norms, p), rel=1e-6), 0.0)
    # four ranks with different gradients, whose flags are added
    apart = combined(on, norms, [1.0] * 3, [0, 0, 0], [1], p, ranks=4)
    assert apart == (pytest.approx(norm_of(norms * 4, p), rel=1e-6), 1.0)


@pytest.mark.parametrize("p", NORM_TYPES)
def test_a_rank_without_gradients_changes_nothing(on, p):
    packed = torch.full((3,), 7.0, dtype=torch.float64, device=on.device)
    on.ops.pack_measurements_(packed, [], [], [], [2, 1], p)
    other = torch.tensor(5.0, dtype=torch.float64)
    unchanged = torch.maximum(packed[0].cpu(), -other) if math.isinf(p) else packed[0].cpu() + other
    assert unchanged.item() == (0.0 if p == math.inf else -5.0 if p == -math.inf else 5.0)
    norm, found = on.ops.unpack_measurements([packed], p)
    expected = {-math.inf: math.inf, -1.0: math.inf}.get(p, 0.0)
    assert (norm.item(), found.item()) == (expected, 0.0)


@pytest.mark.parametrize("p", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_comes_through(on, p, bad):
    norm, found = combined(on, [1.0, bad, 2.0], [0.0, 1.0, 0.0], [0, 0, 0], [1], p)
    expected = norm_of([1.0, bad, 2.0], p) if not math.isnan(bad) else bad
    assert (str(norm), found) == (str(torch.tensor(expected).item()), 1.0)


def test_the_last_place_knows_of_every_overflow(on):
    """The flag of one group is passed on with the norms of the next, unchanged, in float64."""
    first, last = (torch.empty(2, dtype=torch.float64, device=on.device) for _ in range(2))
    on.ops.pack_measurements_(first, tensors([3.0], on.device), tensors([1.0], on.device), [0], [1], 2.0)
    on.ops.pack_measurements_(last, tensors([4.0], on.device), [3 * first[-1]], [0], [1], 2.0)
    norm, found = on.ops.unpack_measurements([first, last], 2.0)
    assert (norm.item(), found.item()) == (5.0, 1.0)


def test_more_measurements_than_one_launch_takes(on):
    assert combined(on, [1.0] * MANY, [0.0] * (MANY - 1) + [1.0], [0] * MANY, [1], 2.0) == (
        pytest.approx(math.sqrt(MANY)),
        1.0,
    )


def test_what_does_not_go_together_is_refused(on):
    packed, one = torch.empty(2, dtype=torch.float64, device=on.device), torch.ones((), device=on.device)
    for given in (
        ([one], [one], [], [1]),
        ([one], [], [1], [1]),
        ([one], [], [-1], [1]),
        ([], [], [], [1, 1]),
    ):
        with pytest.raises(ValueError, match="norms, slots .* give one slot below . for each norm"):
            on.ops.pack_measurements_(packed, *given, 2.0)


def test_nothing_to_read_and_a_dtype_that_ranks_do_not_add_up_in_are_refused(on):
    with pytest.raises(ValueError, match="got no packed measurements; give at least one"):
        on.ops.unpack_measurements([], 2.0)
    one = torch.ones(())
    with pytest.raises(ValueError, match="packed is Float; give float64 without gaps"):
        OP.pack_measurements_(torch.empty(2), [one], [one], [0], [1], 2.0)
    with pytest.raises(ValueError, match="got Float of shape .*; give what pack_measurements_ has written"):
        OP.unpack_measurements([torch.empty(2)], 2.0)


def test_opcheck():
    one, packed = torch.ones(()), torch.empty(2, dtype=torch.float64)
    torch.library.opcheck(OP.pack_measurements_.default, (packed, [one], [one], [0], [1], 2.0))
    torch.library.opcheck(OP.unpack_measurements.default, ([torch.ones(2, dtype=torch.float64)], 2.0))


@pytest.mark.gpu
@pytest.mark.native
def test_each_is_one_launch_from_cpp(cuda_kernels):
    for name in ("pack_measurements_", "unpack_measurements"):
        assert "scalar_ops.cpp" in torch._C._dispatch_dump(f"amp_plugin::{name}")
    if host_device.LOADED:
        one = torch.ones((), device="cuda")
        packed = torch.empty(2, dtype=torch.float64, device="cuda")
        torch.ops.host_device.launched()
        OP.pack_measurements_(packed, [one], [one], [0], [1], 2.0)
        OP.unpack_measurements([packed], 2.0)
        assert torch.ops.host_device.launched() == ["pack_measurements", "unpack_measurements"]
