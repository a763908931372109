"""A rank is killed during a run. torchrun restarts all ranks, or fewer of them, and nothing is lost."""

import json

import pytest

from tests.sharding.elastic_run import END, KILLED_AT, SAVED_EVERY, main
from tests.warm_processes import call

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return seen_by(tmp_path_factory.mktemp("elastic"), "whole models")


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory):
    return seen_by(tmp_path_factory.mktemp("elastic"), "stored shards")


def seen_by(folder, program):
    """Return step, loss, loss scale and skipped steps after each step of each run of a program."""
    done = call(main, folder, program, frameworks=True)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*/seen")
    }
    weights = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/weights of 2 ranks")}
    return {"ended": json.loads((folder / "ended").read_text()), "weights": weights, **seen}


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


@pytest.mark.whole_run
class TestStoredShards:
    """Four ranks with shards stored in 16 bits. One is killed, and two ranks resume."""

    def test_only_the_killed_launch_has_failed(self, stored_runs):
        assert stored_runs["ended"] == [False] + [True] * 6

    @pytest.mark.parametrize("name", ["stored", "stored, resumed in fp32", "never stored"])
    def test_two_ranks_go_on_as_after_an_orderly_end(self, stored_runs, name):
        orderly, resumed_at = stored_runs["stored, unbroken"], KILLED_AT - KILLED_AT % SAVED_EVERY
        assert [step for step, *_ in orderly] == list(range(END))
        assert stored_runs[name][:resumed_at] == orderly[:resumed_at]
        assert stored_runs[name][-(END - resumed_at) :] == orderly[resumed_at:]

    def test_weights_at_the_end_are_equal_to_the_bit(self, stored_runs):
        weights = stored_runs["weights"]
        assert len(weights["stored, unbroken"]) == 287
        for name in ("stored", "stored, resumed in fp32", "never stored"):
            assert weights[name] == weights["stored, unbroken"]
