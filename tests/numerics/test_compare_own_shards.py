"""Shards of FSDP1, and shards that a program makes by hand, are compared at their places in the weights."""

from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

from amp_plugin.numerics.compare import RunComparison, compare_runs, record_run
from amp_plugin.numerics.layout_matches import Matches
from amp_plugin.numerics.recorded import Run
from tests.numerics import columns_and_rows, tiny_transformer
from tests.numerics.columns_and_rows import NAMES, Whole
from tests.numerics.tiny_transformer import Case
from tests.warm_processes import call, call_on_ranks

HEALTHY = [Case("fsdp1", "bf16", "AdamW"), Case("fsdp1_flat", clip=True, steps=1)]
WRONG = [Case("fsdp1", clip=True, local_norm=True, steps=1)]
OTHERS_HEALTHY = [Case("fsdp1"), Case("fsdp1_flat", "bf16"), Case("fsdp1_flat", clip=True)]
OTHERS_WRONG = [Case("fsdp1_flat", clip=True, local_norm=True)]


def located(one: Path, ranks: Path, names: dict[str, str] | None = None) -> tuple[int, int]:
    """Return the number of gradients, and of those that are compared at their places."""
    whole = Run.load(one)
    runs = {rank: Run.load(ranks / f"rank-{rank}.amp") for rank in range(2)}
    matches = Matches(whole, runs, names or {})
    found = [match.layout.is_located for match in matches.all if match.is_gradient]
    assert len(found) == len(whole.gradients)
    return len(found), sum(found)


def record_cases(folder: Path, cases: list[Case], count: int = 2) -> None:
    alone = list(dict.fromkeys(case.alone for case in cases))
    done = [
        call(tiny_transformer.record_all, folder / "1", alone, frameworks=True),
        *call_on_ranks(count, 300, tiny_transformer.record_all, folder / "2", cases),
    ]
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stderr for rank in done)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp1")
    record_cases(folder, HEALTHY + WRONG)
    return folder


def recordings(folder: Path, case: Case) -> tuple[Path, Path]:
    return folder / "1" / f"{case.alone.name}.amp", folder / "2" / f"{case.name}.amp"


@pytest.mark.dist
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_fsdp1_is_silent(flat: Path, case: Case) -> None:
    assert_silent(flat, case)


def assert_silent(folder: Path, case: Case) -> None:
    one, two = recordings(folder, case)
    found = compare_runs(one, two)
    assert found.is_clean, found.report()
    assert found.mesh == {"shards": 2}
    assert found.compared > 100 * case.steps
    gradients, placed = located(one, two)
    assert gradients == placed == 37 * case.steps


@pytest.mark.dist
@pytest.mark.whole_run
def test_healthy_hybrid_fsdp1_on_four_ranks_is_silent(tmp_path: Path) -> None:
    cases = [Case("fsdp1_hybrid"), Case("fsdp1_hybrid", "bf16")]
    record_cases(tmp_path, cases, 4)
    for case in cases:
        found = compare_runs(*recordings(tmp_path, case))
        assert found.is_clean, found.report()
        assert found.mesh == {"replicas": 2, "shards": 2}


@pytest.mark.dist
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_norm_over_local_shards_of_fsdp1_is_named(flat: Path, case: Case) -> None:
    assert_named(flat, case)


@pytest.mark.dist
@pytest.mark.whole_run
def test_so_it_is_with_the_other_options_of_fsdp1(tmp_path: Path) -> None:
    record_cases(tmp_path, OTHERS_HEALTHY + OTHERS_WRONG)
    for case in OTHERS_HEALTHY:
        assert_silent(tmp_path, case)
    for case in OTHERS_WRONG:
        assert_named(tmp_path, case)


def assert_named(folder: Path, case: Case) -> None:
    found = compare_runs(*recordings(folder, case)).unexplained
    assert found is not None
    assert found.mesh == ("shards",)
    assert found.module == ""  # the clip computes with the norm outside of modules
    assert "in train_with" in found.line


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by hand")
    for precision in ("fp32", "bf16"):
        columns_and_rows.record(folder / f"{precision}, one", Whole(), precision=precision)
    done = call_on_ranks(2, 300, columns_and_rows.record_ranks, folder)
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stderr for rank in done)
    return folder


def by_hand(folder: Path, name: str, precision: str = "fp32") -> RunComparison:
    return compare_runs(folder / f"{precision}, one", folder / name, names=NAMES)


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_are_split_by_hand_under_other_names_are_silent(split: Path, precision: str) -> None:
    found = by_hand(split, precision, precision)
    assert found.is_clean, found.report()
    assert found.mesh == {"tensor": 2}
    gradients, placed = located(split / f"{precision}, one", split / precision, NAMES)
    assert (gradients, placed) == (4 * columns_and_rows.STEPS, 3 * columns_and_rows.STEPS)  # one is a replica


@pytest.mark.dist
def test_shards_that_are_swapped_are_named_if_the_placements_are_given(split: Path) -> None:
    swapped = by_hand(split, "swapped").unexplained
    assert swapped is not None
    assert (swapped.op, swapped.module) == ("weight weight", "Whole.up")
    assert "its parts are in the wrong order" in swapped.reason
    # The layer computes the same with both halves swapped, so the sums over the shards do not tell.
    assert by_hand(split, "swapped, no placements").is_clean


def test_placements_that_do_not_fit_the_mesh_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs mesh="):
        record_run(tmp_path / "run", placements={"*": [Shard(0)]})
