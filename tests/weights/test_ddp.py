"""16-bit weights under DistributedDataParallel: gradients are reduced in float32, and all ranks agree."""

import json

import pytest

from tests.warm_processes import call_on_ranks
from tests.weights.ranks import main

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the reports of the two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in call_on_ranks(2, 400, main, folder, CUDA_VISIBLE_DEVICES=""):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("weights", ["bf16", "bf16-stochastic"])
def test_ranks_have_the_same_weights_as_near_to_one_process_as_in_float32(ranks, weights):
    for report in ranks:
        found, plain = report["against_one_process"][weights], report["against_one_process"]["fp32"]
        assert found["same_on_all_ranks"]
        if weights == "bf16":
            assert found["moved"] > 100 * found["distance"]
            assert found["distance"] <= 1.5 * plain["distance"] + 1e-6


def test_gradients_of_a_window_are_averaged_in_float32(ranks):
    assert all(all(report["reduced"]) for report in ranks)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("bucket_views", "gradient_as_bucket_view=True) keeps gradients in the 16 bits"),
        ("own_hook", "has a communication hook, which reduces gradients in the 16 bits"),
        ("one_rank", "('torch.bfloat16', None) on rank 0 and as ('torch.bfloat16', 'bf16-true')"),
    ],
)
def test_what_would_reduce_in_16_bits_is_told_on_all_ranks(ranks, case, text):
    assert all(text in report["refusals"][case] for report in ranks)


def test_a_joined_rank_contributes_zeros_and_a_sharded_optimizer_equals_the_float32_run(ranks):
    for report in ranks:
        assert report["joined"]["same_on_all_ranks"]
        assert report["joined"]["moved"] > 50 * report["joined"]["distance"]
        assert report["zero"]["same_on_all_ranks"]
        assert report["zero"]["moved"] > report["zero"]["distance"] == 0


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_compressed_states_are_kept_and_gone_on_with_to_the_bit(ranks, form, engine):
    for report in ranks:
        found = report["states"][f"{form} {engine}"]
        assert found["forms"] == [form]
        assert found["same"] in {True, None}
        assert found["one_pass"]


def test_frameworks_reduce_in_float32_by_themselves(ranks):
    for report in ranks:
        assert all(
            run["same"] and run["gradients"] in {"torch.float32", None} for run in report["frameworks"]
        )
        assert len({run["sum"] for run in report["frameworks"]}) == 1
