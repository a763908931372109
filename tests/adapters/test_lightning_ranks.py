"""Two gloo processes (DDP by subprocess and by spawn, FSDP2), each compared with one process."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.warm_processes import ROOT, call

SCRIPT = Path(__file__).with_name("lightning_ranks.py")

pytestmark = pytest.mark.dist


RUNS = (
    "ddp_spawn:fp16",
    "single:fp16",
    "ddp:fp16",
    "fsdp2:fp16",
    "fsdp2:bf16",
    "ddp:bf16:poisoned",
    "fsdp2:fp16:poisoned",
)  # the first run must start before autograd has threads


def run_script(words):
    """Run a script with arguments, as ``python SCRIPT WORDS`` does."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return each rank's report for each run. The script is started once for all runs."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [str(SCRIPT), str(folder), *RUNS]
    done = call(run_script, words, environment={"PYTHONPATH": str(ROOT)}, frameworks=True)
    assert done.returncode == 0, done.stderr[-3000:]

    def of(run):
        ranks = sorted((folder / run.replace(":", "_")).glob("rank*.json"))
        return [json.loads(path.read_text()) for path in ranks]

    of.folder = folder
    return of


@pytest.fixture(scope="module")
def alone(reports):
    (result,) = reports("single:fp16")
    assert result["skipped"] == 1
    assert result["scale"] == 2.0**11
    return result


@pytest.mark.parametrize("name", ["ddp", "ddp_spawn", "fsdp2"])
def test_two_processes_do_what_one_does(name, alone, reports):
    ranks = reports(f"{name}:fp16")
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["skipped"], rank["scale"]) == (1, 2.0**11)
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["weights"] == pytest.approx(alone["weights"], rel=2e-3, abs=2e-3)
        assert rank["norm"] == pytest.approx(rank["norms"][-1], rel=1e-5)
        finite = [(a, b) for a, b in zip(rank["norms"], alone["norms"], strict=True) if a < float("inf")]
        assert len(finite) == 5
        for norm, expected in finite:
            assert norm == pytest.approx(expected, rel=5e-3)


def test_the_norm_of_shards_is_known_in_bf16_too(reports):
    ranks = reports("fsdp2:bf16")
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["skipped"], rank["scale"]) == (0, 1.0)
        assert rank["norm"] == pytest.approx(rank["norms"][-1], rel=1e-5)


@pytest.mark.parametrize("run", ["ddp:bf16:poisoned", "fsdp2:fp16:poisoned"])
def test_ranks_write_one_page(run, reports):
    """A nan in rank 1's batch skips the step on both ranks. Only rank 0 writes the page."""
    ranks = reports(run)
    assert [rank["skipped"] for rank in ranks] == [1, 1]
    folder = reports.folder / run.replace(":", "_")
    assert [path.name for path in folder.glob("*.html")] == ["run.html"]
    page = (folder / "run.html").read_text()
    assert "1 of " in page
