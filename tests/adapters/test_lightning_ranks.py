"""Two processes on gloo: DDP by subprocess and by spawn, FSDP2; each beside one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("lightning_ranks.py")

pytestmark = pytest.mark.dist


def run(name, folder, precision="fp16"):
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), name, precision, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (result,) = run("single", tmp_path_factory.mktemp("single") / "out")
    assert result["skipped"] == 1
    assert result["scale"] == 2.0**11
    return result


@pytest.mark.parametrize("name", ["ddp", "ddp_spawn", "fsdp2"])
def test_two_processes_do_what_one_does(name, alone, tmp_path):
    ranks = run(name, tmp_path / "out")
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


def test_the_norm_of_shards_is_known_in_bf16_too(tmp_path):
    for rank in run("fsdp2", tmp_path / "out", "bf16"):
        assert (rank["skipped"], rank["scale"]) == (0, 1.0)
        assert rank["norm"] == pytest.approx(rank["norms"][-1], rel=1e-5)
