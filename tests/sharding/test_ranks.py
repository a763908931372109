"""Two and four gloo processes: dtypes of collectives, equality with one process, and skips on all ranks."""

import json

import pytest

from amp_plugin.sharding.fully_shard import has_dtypes_by_parameter
from tests.sharding.checkpoints import crossed_of, keepers_of
from tests.sharding.fronts import FRONTS
from tests.sharding.parts import RUNS, equality_runs, overflow_ways
from tests.sharding.ranks import launch
from tests.sharding.variants import variants_of
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.dist

# Collectives of a forward and backward pass. Before torch 2.15, modules in fp32 are separate units.
CALLS = {"fsdp2": 8, "hsdp": 11} if has_dtypes_by_parameter() else {"fsdp2": 14, "hsdp": 19}
WHOLE = [pytest.mark.slow, pytest.mark.whole_run]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=WHOLE)], ids=["few", "whole"])
def whole(request):
    """Return whether all runs are made: with 20 steps, and overflows with a fused and a plain optimizer."""
    return request.param


def each_of(argument, choose):
    """Parametrize by the few cases of ``choose(False)``, and by all cases in whole runs."""
    cases = [
        pytest.param(whole, case, marks=WHOLE if whole else ())
        for whole in (False, True)
        for case in choose(whole)
    ]
    return pytest.mark.parametrize(("whole", argument), cases, indirect=["whole"], scope="module")


@pytest.fixture(scope="module")
def reports(whole, tmp_path_factory):
    """Return the ranks' reports, by number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = WarmProcess(launch, folder, whole, frameworks=True).wait(800)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return {
        count: [json.loads((folder / f"rank{rank}-of-{count}.json").read_text()) for rank in range(count)]
        for count in (4, 2)
    }


@pytest.fixture(scope="module")
def four(reports):
    return reports[4]


@pytest.fixture(scope="module")
def two(reports):
    return reports[2]


def found(ranks, part, key):
    """Return each rank's report. An error on a rank fails the test."""
    reports = [rank[part] for rank in ranks]
    for report in reports:
        assert "error" not in report, report["error"]
        assert "error" not in report.get(key.rpartition(" ")[0], {}), report[key.rpartition(" ")[0]]["error"]
        assert "error" not in report.get(key, {}), report[key]["error"]
    return [report[key] for report in reports]


class TestCollectives:
    @pytest.mark.parametrize("reduce", ["fp32", "bf16"])
    @pytest.mark.parametrize(("ranks", "strategy"), [(4, "fsdp2"), (4, "hsdp"), (2, "fsdp2")])
    def test_each_carries_what_the_plan_says_and_there_is_no_other(self, reports, ranks, strategy, reduce):
        for report in found(reports[ranks], "collectives", f"{strategy} {reduce}"):
            assert (report["extra"], report["missing"], report["calls"]) == ([], [], CALLS[strategy])

    @pytest.mark.parametrize("reduce", ["fp32", "bf16"])
    def test_tensor_parallelism_adds_activations_up_in_the_dtype_they_are_computed_in(self, four, reduce):
        for report in found(four, "collectives", f"tp {reduce}"):
            assert report["missing"] == []
            assert [(op, dtype, calls) for op, dtype, _, _, _, calls in report["extra"]] == [
                ("all_reduce", "bf16", 2),  # outputs of both blocks
                ("all_reduce", "fp32", 2),  # gradients with respect to their norms
            ]

    @pytest.mark.parametrize("way", ["all weights in fp32", "weights in bf16"])
    @pytest.mark.parametrize("reduce", ["fp32", "bf16"])
    def test_the_first_version_of_fsdp(self, four, two, reduce, way):
        for report in found([*four, *two], "collectives", f"fsdp1 {reduce} {way}"):
            assert (report["extra"], report["missing"], report["calls"]) == ([], [], 8)

    @pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
    def test_shards_unlike_the_plan_are_seen(self, four, two, strategy):
        for report in found([*four, *two], "collectives", f"{strategy} broken"):
            as_bytes = {"uint8"} if strategy == "fsdp2" and has_dtypes_by_parameter() else set()
            assert {dtype for _, dtype, *_ in report["extra"]} == {"bf16"}
            assert {dtype for _, dtype, *_ in report["missing"]} == {"fp32", *as_bytes}


@each_of("run", equality_runs)
def test_a_step_carries_the_plans_collectives_and_one_decision_of_all_ranks(four, run):
    for report in found(four, "equality", run):
        assert_only_the_plans(run, report["last"])


def assert_only_the_plans(run, report):
    front, strategy = run.split()
    assert report["missing"] == []
    found = {(op, dtype): (elements, calls) for op, dtype, elements, _, _, calls in report["extra"]}
    layouts, groups = {"tp": (2, 2), "hsdp": (1, 2)}.get(strategy, (1, 1))
    once_a_group = (layouts + 1, groups)  # elements and calls: the norms, and the overflow flag
    assert found.pop(("all_reduce", "fp64")) == once_a_group
    if front == "trainer":
        assert found.pop(("broadcast", "int64")) == (1, 1)  # the Trainer agrees whether to stop
    if strategy == "tp":
        assert found.pop(("all_reduce", "fp32")) == (12, 4)  # activations and their gradients
    assert found == {}


class TestEveryStrategyUnderEveryFront:
    @each_of("run", equality_runs)
    def test_steps_are_those_of_one_process(self, four, whole, run):
        for report in found(four, "equality", run):
            assert report["steps"] == (20 if whole else 4)
            assert report["moved"] > (0.1 if whole else 0.02)
            assert report["losses"] < 1e-6
            assert report["weights"] < 1e-6

    @each_of("run", lambda whole: [run for run in RUNS if overflow_ways(run, whole)])
    def test_an_overflow_on_one_rank_skips_the_step_on_all(self, four, whole, run):
        for way in overflow_ways(run, whole):
            for report in found(four, "overflow", f"{run} {way}"):
                assert report["skipped"] == [False, True, False]
                assert report["finite"]
                assert report["scale"] == 2.0**9

    def test_few_runs_still_take_each_strategy_under_each_front(self):
        assert {*equality_runs(whole=False), *(run for run in RUNS if overflow_ways(run, whole=False))} == {
            *RUNS
        }


@each_of("variant", variants_of)
def test_what_fsdp2_is_used_with_changes_no_number(four, variant):
    for report in found(four, "variants", variant):
        assert report["losses"] < 1e-6
        assert report["weights"] < 1e-6


@each_of("keeper", keepers_of)
def test_two_ranks_go_on_where_four_have_saved(four, two, keeper):
    saved, resumed = found(four, "save", keeper)[0], found(two, "resume", keeper)[0]
    assert saved["scale"] == resumed["scale"] == 2.0**9  # one step was skipped before the save
    if "trainer" not in keeper:
        assert resumed["loaded"] == saved["saved"]
    texts = [text for text in resumed.get("told", ()) if "is not loaded" in text]
    if keeper == "accelerate fsdp1":  # Accelerate does not load the optimizer's state here
        (text,) = texts
        assert "fsdp_version=2" in text
        assert "the optimizer starts without state" in text
        return
    assert texts == []
    # the saved run had one of the three good steps that growth needs
    assert saved["end"] == resumed["end"] == 2.0**11
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-6)
    assert resumed["weights"] == pytest.approx(saved["weights"], rel=1e-6, abs=1e-9)


@each_of("keeper", crossed_of)
def test_stored_runs_and_float32_runs_load_checkpoints_of_each_other(four, two, keeper):
    saved, resumed = found(four, "save", keeper.partition(",")[0])[0], found(two, "resume", keeper)[0]
    assert saved["scale"] == resumed["scale"] == 2.0**9
    assert saved["end"] == resumed["end"] == 2.0**11
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-6)
    assert resumed["weights"] == pytest.approx(saved["weights"], rel=1e-6, abs=1e-9)
    if "trainer" not in keeper:
        assert resumed["loaded"] == saved["saved"]


@pytest.mark.parametrize("front", FRONTS)
def test_stored_weights_are_those_of_float32_shards(four, front):
    for report in found(four, "stored", front):
        assert report["equal"]
        assert report["losses"]
        in_fp32 = {name for name, dtype in report["stored"].items() if dtype == "fp32"}
        assert in_fp32 == {f"blocks.{block}.norm.{name}" for block in range(2) for name in ("weight", "bias")}
        assert {*report["stored"].values()} == {"fp32", "bf16"}


@pytest.mark.parametrize("front", FRONTS)
def test_fsdp1_refuses_weights_in_16_bits_and_names_fsdp2(four, front):
    for text in found(four, "refusals", front):
        assert "weights='bf16' does not work with FSDP1" in text
        assert "Shard by FSDP2: fully_shard" in text
