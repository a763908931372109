"""Ranks that torch simulates in one process are recorded as if each were a process of its own."""

import json
from pathlib import Path

import pytest
import torch

from amp_plugin.numerics.compare import RunComparison, compare_runs
from tests.numerics import parallel_by_hand, tiny_transformer
from tests.numerics.parallel_by_hand import BUGS
from tests.numerics.tiny_transformer import Case
from tests.warm_processes import call

pytest.importorskip("torch.distributed._local_tensor", reason="this torch simulates no ranks")

QUICK = [Case("sp", "bf16", steps=1)]
WHOLE = [
    Case(layout, precision, optimizer)
    for layout in ("tp", "sp")
    for precision in ("fp32", "bf16")
    for optimizer in ("SGD", "AdamW")
]
# Dropout on simulated ranks draws from one generator that all ranks share, so these bugs cannot be planted.
ALL_BUGS = [bug for bug in BUGS if "dropout" not in bug]


def recorded(folder: Path, function: object, *arguments: object) -> None:
    done = call(function, *arguments, frameworks=True)
    assert done.returncode == 0, done.stderr


def record_layouts(folder: Path, count: int, cases: list[Case]) -> None:
    alone = list(dict.fromkeys(case.alone for case in cases))
    recorded(folder, tiny_transformer.record_all, folder / "1", alone)
    recorded(folder, tiny_transformer.record_simulated, folder / str(count), count, cases)


def assert_silent(folder: Path, count: int, case: Case) -> None:
    ranks = folder / str(count) / f"{case.name}.amp"
    found = compare_runs(folder / "1" / f"{case.alone.name}.amp", ranks)
    assert found.is_clean, f"{case.name}\n{found.report()}"
    assert found.mesh == {"tensor": count}
    assert found.compared > 100 * case.steps
    assert found.only_first == 0  # each result of the one process has its counterpart
    files = [f"rank-{rank}.amp" for rank in range(count)]
    assert sorted(path.name for path in ranks.iterdir()) == ["manifest.json", *files]
    assert json.loads((ranks / "manifest.json").read_text())["mesh"] == {"tensor": count}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    record_layouts(folder, 2, QUICK)
    return folder


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_healthy_layout_is_silent(layouts: Path, case: Case) -> None:
    assert_silent(layouts, 2, case)


@pytest.mark.whole_run
def test_all_healthy_layouts_are_silent(tmp_path: Path) -> None:
    for count in (2, 4):
        record_layouts(tmp_path, count, WHOLE)
        for case in WHOLE:
            assert_silent(tmp_path, count, case)


def with_bug(folder: Path, bug: str) -> RunComparison:
    return compare_runs(folder / "one.amp", folder / f"{bug}.amp")


@pytest.mark.whole_run
def test_all_bugs_of_sharding_are_named(tmp_path: Path) -> None:
    recorded(tmp_path, parallel_by_hand.record_alone, tmp_path)
    recorded(tmp_path, parallel_by_hand.record_simulated, tmp_path, ALL_BUGS)
    healthy = with_bug(tmp_path, "healthy")
    assert healthy.is_clean, healthy.report()
    assert healthy.mesh == {"data": 2, "tensor": 2}
    dimensions = {}
    for bug in ALL_BUGS:
        found = with_bug(tmp_path, bug).unexplained
        assert found is not None, bug
        dimensions[bug] = found.mesh
    exact = [bug for bug, found in dimensions.items() if not BUGS[bug] or found == (BUGS[bug],)]
    assert len(exact) >= len(ALL_BUGS) - 1, dimensions


def enter_the_mode_inside(folder: Path) -> None:
    """Enter LocalTensorMode inside the recording, and check that a warning says what to do."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from amp_plugin.numerics.compare import record_run

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with (
        record_run(folder / "run.amp"),
        pytest.warns(UserWarning, match="LocalTensorMode was entered inside record_run"),
        LocalTensorMode(2),
    ):
        torch.ones(2) * 2


def test_a_mode_that_is_entered_inside_is_warned_of(tmp_path: Path) -> None:
    recorded(tmp_path, enter_the_mode_inside, tmp_path)
