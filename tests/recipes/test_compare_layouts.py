"""The recipe that compares FSDP2 with one process: a healthy run gives no message, and a layer left out is
named.
"""

import json
from pathlib import Path

import pytest

from amp_plugin.numerics.compare import compare_runs
from recipes.compare_layouts import Run, compare, train
from tests.warm_processes import call, call_on_ranks


def train_rank(run: Run) -> None:
    train(run)


@pytest.mark.dist
@pytest.mark.whole_run
def test_fsdp2_is_silent_and_a_layer_that_it_leaves_out_is_named(tmp_path: Path) -> None:
    one = Run(tmp_path / "one.amp", is_sharded=False)
    runs = [Run(tmp_path / "fsdp2.amp"), Run(tmp_path / "forgotten.amp", forgets_last=True)]
    ended = [call(train_rank, one, frameworks=True)]
    for run in runs:
        ended += call_on_ranks(2, 200, train_rank, run)
    assert all(process.returncode == 0 for process in ended), ended[-1].stderr
    healthy, forgotten = (compare_runs(one.path, run.path) for run in runs)
    assert healthy.is_clean, healthy.report()
    assert forgotten.unexplained is not None
    assert forgotten.unexplained.module == "Classifier.last"
    assert forgotten.unexplained.mesh == ("data",)


def print_which_are_clean(folder: Path) -> None:
    print(json.dumps([found.is_clean for found in compare(folder).values()]))


@pytest.mark.dist
def test_the_recipe_runs_to_its_end(tmp_path: Path) -> None:
    process = call(
        print_which_are_clean, tmp_path, frameworks=True
    )  # its ranks are copies, not new interpreters
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [True, False]
