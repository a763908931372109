"""16-bit weights that FSDP2 shards equal the float32 run bit for bit, on two and on four gloo ranks."""

import json

import pytest

from tests.sharding.stored import NOT_STORED, OVERFLOWS, POISONED
from tests.sharding.stored_ranks import ALL, CASES, FEW_LOADED_BY, LOADED_BY, main
from tests.warm_processes import call_on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.native]

MARKS = [pytest.mark.slow, pytest.mark.whole_run]
OF_SAMPLE = [name for name, case in CASES.items() if not case.is_whole_run]
EACH_RUN = [(False, name) for name in OF_SAMPLE] + [pytest.param(True, name, marks=MARKS) for name in CASES]


@pytest.fixture(params=[False, pytest.param(True, marks=MARKS)], ids=["few", "whole"])
def whole(request):
    """Return whether all cases run, each with 50 steps."""
    return request.param


@pytest.fixture
def ranks(request, whole):
    """Return the reports of the four ranks."""
    return request.getfixturevalue("ranks_of_whole_run" if whole else "ranks_of_sample")


@pytest.fixture(scope="module")
def ranks_of_sample(tmp_path_factory):
    return launch(tmp_path_factory, whole=False)


@pytest.fixture(scope="module")
def ranks_of_whole_run(tmp_path_factory):
    return launch(tmp_path_factory, whole=True)


def launch(tmp_path_factory, *, whole):
    folder = tmp_path_factory.mktemp("ranks")
    for rank in call_on_ranks(4, 900, main, folder, whole, CUDA_VISIBLE_DEVICES=""):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def found(ranks, case):
    """Return the ranks' reports of a case. An error on a rank fails the test."""
    reports = [rank[case] for rank in ranks if case in rank]
    assert len(reports) == (4 if case not in CASES or CASES[case].ranks == ALL else 2)
    for report in reports:
        assert "error" not in report, report["error"]
    return reports


@pytest.mark.parametrize(("whole", "case"), EACH_RUN)
class TestEachLayout:
    def test_weights_are_those_of_float32_shards_after_each_step(self, ranks, whole, case):
        """All weights are equal, of parameters in 16 bits and of those in float32."""
        for report in found(ranks, case):
            assert report["ties"] == 0
            assert report["equal"] == [True] * CASES[case].steps(whole)
            assert report["moved"] > 1e-4

    def test_a_bad_batch_and_a_bad_gradient_of_one_rank_skip_the_step_on_all(self, ranks, case):
        for report in found(ranks, case):
            for skipped in report["skipped"]:
                assert [step for step, was in enumerate(skipped) if was] == [POISONED, OVERFLOWS]

    def test_as_many_collectives_carry_as_many_bytes(self, ranks, case):
        for report in found(ranks, case):
            assert report["collectives"][1] == report["collectives"][0] > 0
            assert report["carried"][1] == report["carried"][0] > 0

    def test_which_parameters_are_not_stored(self, ranks, case):
        for report in found(ranks, case):
            assert {*report["not stored"]} == NOT_STORED

    def test_how_steps_are_taken(self, ranks, case):
        is_own = case in {"own step", "ASGD"}
        for report in found(ranks, case):
            assert report["how"].startswith("the optimizer's own step" if is_own else "in one pass")


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
            "stored": ["torch.bfloat16"],
            "local_bytes": 4 * (512 * 512 + 512) // 2,
        }


def test_linux_counts_as_many_bytes(ranks):
    """Per parameter of the whole model, on each of two ranks: float32 shards, and pairs with 8-bit moments."""
    for report in found(ranks, "measured"):
        assert report["fp32"] == pytest.approx(16 / 2, abs=0.15)
        assert report["8bit"] == pytest.approx(10.0625 / 2, abs=0.15)


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
    """Four ranks save stored runs and float32 runs. Two ranks load each into the other kind, or into both."""

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
    def test_each_kind_of_run_loads_the_other_kind_to_the_bit(self, reports, whole, way):
        for report in reports:
            assert report[way] == [True] * (4 if whole else 2)

    def test_all_go_on_alike(self, reports, whole):
        for report in reports:
            assert report["ends"] == [True] * (4 if whole else 2)


EACH_LOAD = [(False, into) for into in FEW_LOADED_BY]
EACH_LOAD += [pytest.param(True, into, marks=MARKS) for into in LOADED_BY]


@pytest.mark.parametrize(("whole", "into"), EACH_LOAD)
def test_each_layout_loads_what_other_layouts_have_saved(ranks, whole, into):
    """Weights and moments are equal to the bit, between stored and float32 runs, and all go on alike."""
    for report in found(ranks, "layouts"):
        loaded = {key: equal for key, equal in report.items() if f" into {into}, " in key}
        assert len(loaded) == (12 if whole else 1)
        assert {key for key, equal in loaded.items() if equal != [True, True]} == set()
        continued = [equal for key, equal in report.items() if key.endswith(f"continued as {into}")]
        assert continued == ([[True] * 4] * 3 if whole else [[True]])
