"""Invariant 5: all ranks take the same decision, and norms equal those of one process."""

import json
import math

import pytest
import torch

from tests.scaling.distributed_worker import BOTH, CALLS, FULL, net, report
from tests.warm_processes import call_on_ranks

pytestmark = pytest.mark.dist


def run(world, folder):
    ranks = call_on_ranks(world, 240, report, folder)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stderr for rank in ranks)[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("fused", BOTH)
@pytest.mark.parametrize("has_gradients", BOTH)
def test_one_rank_overflows(two, fused, has_gradients, scale):
    ranks = [result[f"plain {fused} {has_gradients} {scale}"] for result in two]
    lowered = 1.0 if scale is None else scale / 2
    for bad, good in ranks:
        assert (bad["skipped"], bad["scale"], bad["values"]) == (True, lowered, [0.0])
        assert (good["skipped"], good["scale"]) == (False, lowered)
    there, here = (0, 1) if has_gradients else (1, 0)
    assert ranks[there][0]["elsewhere"]
    assert ranks[there][0]["found"] == []
    assert ranks[here][0]["found"] == ["param_groups[0]['params'][0]"]


@pytest.mark.parametrize("of", ["norm", "loss"])
def test_a_spike_of_one_rank_is_one_for_all(two, of):
    """The norm is over both shards, and the loss is the mean of both ranks.

    All ranks' statistics are identical to the bit.
    """
    one, other = (result[f"spikes {of}"] for result in two)
    assert one["told"] == other["told"] == ["spike" if step == 6 else "landed" for step in range(8)]
    assert one["state"] == other["state"]


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_without_gradients_takes_part(two, call):
    for result in two:
        one = result[f"no gradients {call}"]
        assert not one["skipped"]
        if call.startswith("norm"):  # rank 0 has the first half of both
            right = math.sqrt(2 * FULL[:4].square().sum().item())
            assert one["norm"] == pytest.approx(right, rel=1e-6)


def test_ddp(two, scale):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    expected = []
    for skipped in (False, True, False):
        optimizer.zero_grad()
        (model(torch.full((1, 4), 1.0)).sum() + model(torch.full((1, 4), 2.0)).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if not skipped:
            optimizer.step()
        expected.append((skipped, norm, [p.sum().item() for p in model.parameters()]))
    for result in two:
        for mine, (skipped, norm, values) in zip(result[f"ddp {scale}"], expected, strict=True):
            assert mine["skipped"] == skipped
            assert mine["values"] == pytest.approx(values, rel=1e-5)
            if not skipped:
                assert mine["clip"] == mine["norm"] == pytest.approx(norm, rel=1e-6)
        assert set(result[f"ddp {scale}"][1]["found"]) == {"module.weight"}


def test_unscaling_in_mid_window_waits_for_ddps_reduction(two):
    for result in two:
        assert result["ddp_mid_window"] == {"grad": 3.0, "moved": 3.0}


@pytest.mark.parametrize("kind", ["dtensors", "fused dtensors"])
def test_sharded_replicated_and_plain_parameters(two, kind):
    copies = 2 if kind.startswith("fused") else 3
    for result in two:
        one = result[f"{kind} None"]
        assert not one["skipped"]
        assert one["norm"] == pytest.approx(math.sqrt(copies * FULL.square().sum().item()), rel=1e-6)
        moved = -8.0 if kind.startswith("fused") else -FULL.sum().item()  # Adam's first step is lr * sign
        assert one["values"] == pytest.approx([moved] * copies, rel=1e-5)


@pytest.mark.parametrize(
    "case", ["dtensors 0", "dtensors 1", "dtensors 2", "fused dtensors 0", "fused dtensors 1"]
)
def test_an_overflow_on_one_rank_only(two, case):
    """Parameters are sharded, replicated and plain. torch misses the overflow in the last two."""
    for rank, result in enumerate(two):
        assert (result[case]["skipped"], result[case]["scale"]) == (True, 4.0)
        assert result[case]["elsewhere"] == (rank == 0)


def test_a_partial_gradient_is_summed_first(two):
    for result in two:
        assert result["partial"]["values"] == [-8.0 * 2]
        assert result["partial"]["norm"] == pytest.approx(2.0 * math.sqrt(8.0), rel=1e-6)


def one_process(fused):
    model = net(5, 7, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    norms = []
    for i in (0, 1, 3):
        optimizer.zero_grad()
        model(torch.full((2, 5), 1.0 + i)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms, [p.detach().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("fused", BOTH)
def test_fsdp_equals_one_process(two, kind, fused, scale):
    norms, values = one_process(fused)
    for result in two:
        one = result[f"{kind} {fused} {scale}"]
        assert [norm for norm in one["norms"] if norm is not None] == pytest.approx(norms, rel=1e-5)
        assert one["values"] == pytest.approx(values, rel=1e-4)
        assert one["skipped"] == [False, False, True, False]
    if kind == "fsdp1":
        assert any(result[f"{kind} {fused} {scale}"]["empty"] for result in two), "it shows too little"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run(4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
def test_fsdp2_over_tensor_parallelism(four):
    for result in four:
        one = result["tensor_parallel"]
        assert one["steps"][0] == [pytest.approx(one["right"], rel=1e-5), False]
        assert one["steps"][1] == [[None] * 3, True]
        assert "_StridedShard" in one["kinds"]
