"""16-bit weights that FSDP2 shards equal the float32 run bit for bit, on two and on four gloo ranks."""

import json

import pytest

from tests.sharding.stored import FEW, POISONED, STEPS, main
from tests.warm_processes import call_on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.native]

BY_PAIR = (("AdamW", "own step", "before", "ASGD", "8bit"), ("SGD", "Lion", "offloaded", "tensor parallel"))
TOGETHER = ("hsdp", "two-dimensional", "no reshard")
CASES = (*BY_PAIR[0], *BY_PAIR[1], *TOGETHER)
LONG = ("AdamW", "SGD", "Lion", "tensor parallel")


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.whole_run])],
    ids=["few", "whole"],
)
def whole(request):
    """Return whether each case takes 50 steps."""
    return request.param


@pytest.fixture(scope="module")
def ranks(whole, tmp_path_factory):
    """Return the reports of the four ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in call_on_ranks(4, 600, main, folder, whole, CUDA_VISIBLE_DEVICES=""):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def found(ranks, case):
    """Return the ranks' reports of a case. An error on a rank fails the test."""
    reports = [rank[case] for rank in ranks if case in rank]
    assert len(reports) == (4 if case in TOGETHER else 2)
    for report in reports:
        assert "error" not in report, report["error"]
    return reports


@pytest.mark.parametrize("case", CASES)
class TestEachLayout:
    def test_weights_are_those_of_float32_shards_after_each_step(self, ranks, whole, case):
        for report in found(ranks, case):
            assert report["ties"] == 0
            assert report["equal"] == [True] * (STEPS if whole or case in LONG else FEW)
            assert report["moved"] > 1e-4

    def test_a_poisoned_batch_of_one_rank_skips_the_step_on_all(self, ranks, case):
        for report in found(ranks, case):
            for skipped in report["skipped"]:
                assert [step for step, was in enumerate(skipped) if was] == [POISONED]

    def test_as_many_collectives_carry_as_many_bytes(self, ranks, case):
        for report in found(ranks, case):
            assert report["collectives"][1] == report["collectives"][0] > 0
            assert report["carried"][1] == report["carried"][0] > 0

    def test_which_parameters_are_stored(self, ranks, case):
        """Frozen parameters are not stored, and neither are those whose FSDP2 unit gathers float32.

        Without FSDP2, only parameters that autocast casts are stored.
        """
        norms = {f"blocks.{block}.norm.{name}" for block in range(2) for name in ("weight", "bias")}
        for report in found(ranks, case):
            if case == "tensor parallel":
                in_parallel = {name for name in report["not stored"] if ".up." in name or ".down." in name}
                assert in_parallel == set()
            else:
                assert {*report["not stored"]} == norms | {"base.weight", "base.bias"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in {"own step", "ASGD"}])
def test_steps_are_taken_in_one_pass(ranks, case):
    for report in found(ranks, case):
        assert report["how"] == "in one pass"


def test_torchs_own_steps_see_float32(ranks):
    for case in ("own step", "ASGD"):
        for report in found(ranks, case):
            assert report["how"].startswith("the optimizer's own step")


def test_some_shards_are_empty(ranks):
    assert any(report["empty"] for report in found(ranks, "AdamW"))


def test_a_parameter_takes_ten_bytes_on_one_rank(ranks):
    for rank in ranks:
        assert rank["counted"] == {
            "parameters": (512 * 512 + 512) // 2,
            "weights": 2.0,
            "masters": 2.0,
            "gradients": 4.0,
            "optimizer_state": pytest.approx(2.0625, rel=1e-3),
            "total": pytest.approx(10.0625, rel=1e-3),
            "stored": "torch.bfloat16",
            "local_bytes": 4 * (512 * 512 + 512) // 2,
        }


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("gathered in fp32", "gathers no weight in torch.bfloat16: shard it by fully_shard"),
        ("in 16 bits", "shards are in torch.bfloat16: call model.float() before fully_shard"),
        ("true", "Use weights='bf16' under autocast"),
    ],
)
def test_models_whose_weights_cannot_be_stored(ranks, case, text):
    for rank in ranks:
        assert text in rank["refusals"][case]


def test_parameters_of_fsdp2_are_those_of_the_model(ranks):
    assert all(rank["gathered"] is True for rank in ranks)


class TestCheckpoints:
    """Four ranks save stored runs and float32 runs. Two ranks load each into both kinds of models."""

    @pytest.fixture
    def reports(self, ranks):
        for rank in ranks:
            assert "error" not in rank["checkpoints"], rank["checkpoints"]["error"]
        return [rank["checkpoints"] for rank in ranks]

    def test_they_hold_exact_float32(self, reports):
        for report in reports:
            assert report["dtypes"] == ["torch.float32"]
            assert report["equal"] is True

    @pytest.mark.parametrize("way", ["loaded", "full", "still stored"])
    def test_each_kind_of_run_loads_each_kind_to_the_bit(self, reports, way):
        for report in reports:
            assert report[way] == [True] * 4

    def test_all_go_on_alike(self, reports):
        for report in reports:
            assert report["ends"] == [True] * 4
