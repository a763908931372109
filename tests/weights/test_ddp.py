"""Weights in 16 bits under DistributedDataParallel: reduced in float32, the same on all ranks."""

import json

import pytest

from tests.warm_processes import call_on_ranks
from tests.weights.ranks import main


def run(count, folder):
    for rank in call_on_ranks(count, 400, main, folder, CUDA_VISIBLE_DEVICES=""):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.whole_run])],
    ids="{}-ranks".format,
)
def ranks(request, tmp_path_factory):
    return run(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.dist
class TestDistributedDataParallel:
    def test_ranks_have_the_same_weights(self, ranks):
        for report in ranks:
            assert {w: found["same_on_all_ranks"] for w, found in report["against_one_process"].items()} == {
                "fp32": True,
                "bf16": True,
                "bf16-stochastic": True,
            }

    def test_they_are_as_near_to_one_process_as_with_float32_weights(self, ranks):
        found = ranks[0]["against_one_process"]
        assert found["bf16"]["moved"] > 100 * found["bf16"]["distance"]
        assert found["bf16"]["distance"] <= 1.5 * found["fp32"]["distance"] + 1e-6

    def test_gradients_of_a_window_are_averaged_in_float32(self, ranks):
        assert all(all(report["reduced"]) for report in ranks)

    def test_what_would_reduce_in_16_bits_is_told(self, ranks):
        told = ranks[0]["refusals"]
        assert "gradient_as_bucket_view=True) keeps gradients in the 16 bits" in told["bucket_views"]
        assert "has a communication hook, which reduces gradients in the 16 bits" in told["own_hook"]

    def test_a_joined_rank_contributes_zeros(self, ranks):
        if len(ranks) > 2:
            pytest.skip("run on two ranks")
        for report in ranks:
            assert report["joined"]["same"], "all bits"
            assert report["joined"]["moved"] > 50 * report["joined"]["distance"]

    def test_an_optimizer_that_is_sharded_equals_the_float32_run(self, ranks):
        if len(ranks) > 2:
            pytest.skip("run on two ranks")
        assert [report["zero"] for report in ranks] == [{"same": True, "equal": True}] * 2

    def test_a_conversion_on_one_rank_is_an_error_on_all(self, ranks):
        if len(ranks) > 2:
            pytest.skip("run on two ranks")
        for report in ranks:
            assert (
                "parameter 0 is stored as ('torch.bfloat16', None) on rank 0 and as ('torch.bfloat16', 'bf16-true')"
                in report["one_rank"]
            )

    @pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
    @pytest.mark.parametrize("form", ["bf16", "8bit"])
    def test_compressed_states_are_kept_and_gone_on_with_to_the_bit(self, ranks, form, engine):
        if len(ranks) > 2:
            pytest.skip("run on two ranks")
        for report in ranks:
            found = report["states"][f"{form} {engine}"]
            assert found["forms"] == [form]
            assert found["same"] in {True, None}
            assert found["one_pass"] == (engine == "ddp")

    @pytest.mark.parametrize("framework", ["in_trainer", "in_fabric", "in_accelerate"])
    def test_frameworks_reduce_in_float32_by_themselves(self, ranks, framework):
        if len(ranks) > 2:
            pytest.skip("run on two ranks")
        for report in ranks:
            assert report[framework]["halves"] is (framework != "in_trainer"), (
                "the Trainer gives float32 back"
            )
            assert report[framework]["same"]
            assert report[framework]["gradients"] in {"torch.float32", None}
        sums = {run: ranks[0][run]["sum"] for run in ("in_trainer", "in_fabric", "in_accelerate")}
        assert len(set(sums.values())) == 1, sums
