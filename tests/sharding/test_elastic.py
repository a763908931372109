"""A rank is killed during a run. torchrun restarts all ranks, or fewer of them, and nothing is lost."""

import json
import subprocess
import sys

import pytest

from tests.sharding.elastic_run import END, KILLED_AT, SAVED_EVERY

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return step, loss, loss scale and skipped steps after each step of each run."""
    folder = tmp_path_factory.mktemp("elastic")
    command = [sys.executable, "-m", "tests.sharding.elastic_run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*/seen")
    }
    return {"ended": json.loads((folder / "ended").read_text()), **seen}


def test_what_was_killed_has_failed_unless_it_was_restarted(runs):
    assert runs["ended"] == [True, True, False, True, True, True]


def test_as_many_ranks_go_on_as_if_nothing_had_been(runs):
    unbroken, restarted = runs["unbroken"], runs["restarted"]
    assert [step for step, *_ in unbroken] == list(range(END))
    resumed_at = KILLED_AT - KILLED_AT % SAVED_EVERY
    assert restarted[:KILLED_AT] == unbroken[:KILLED_AT]
    assert restarted[KILLED_AT:] == unbroken[resumed_at:]


def test_fewer_ranks_go_on_as_after_an_orderly_end(runs):
    fewer, orderly = runs["fewer"], runs["fewer, unbroken"]
    resumed_at = KILLED_AT - KILLED_AT % SAVED_EVERY
    assert fewer[KILLED_AT:] == orderly[resumed_at:]
    losses = [loss for _, loss, *_ in orderly]
    assert losses == pytest.approx([loss for _, loss, *_ in runs["unbroken"]], rel=2e-3)


def test_scale_and_counts_are_resumed(runs):
    for name in ("unbroken", "restarted", "fewer"):
        assert runs[name][-1][2:] == [2.0**11, 1]
