"""The command `amp-plugin diagnose` in two processes, one of which creates a nan."""

import sys
from pathlib import Path

import pytest

from amp_plugin.cli import app
from tests.warm_processes import call_on_ranks

pytestmark = pytest.mark.dist

SECONDS = 120  # much shorter than the half hour that gloo waits for a rank that does not answer
SCRIPT = """\
import os, sys, torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
weight = torch.ones(2, requires_grad=True)
y = weight.log() if rank == 0 else (weight - 1).sqrt()
y.sum().backward()
dist.all_reduce(weight.grad)
print("sum", (weight.grad * 2).sum().item() == 0)
"""


def diagnose(words: list[str]) -> None:
    """Do what the command ``amp-plugin diagnose`` does."""
    sys.argv = ["amp-plugin", "diagnose", *words]
    app()


def run(folder: Path, *options: str) -> list[tuple[int, str, str]]:
    """Run the script in two processes. Return exit code, output and errors of each rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words = [*options, str(script), str(folder / "store")]
    ranks = call_on_ranks(2, SECONDS, diagnose, words, COLUMNS="300", NO_COLOR="1")
    return [(rank.returncode, rank.stdout, rank.stderr) for rank in ranks]


def test_the_rank_that_stops_is_named_and_the_other_ends(tmp_path: Path) -> None:
    (code, output, errors), (its_code, its_output, _) = run(tmp_path)
    assert (code, its_code) == (1, 1)
    assert "made inf in the backward pass of aten::sqrt.default" in its_output
    assert "  rank    1\n" in its_output
    assert "made" not in output
    assert (
        "rank 0 found nothing before the error above. If another rank has stopped, that is the reason"
        in errors
    )


def test_keep_going_stops_no_rank_and_tells_whose_nan_it_is(tmp_path: Path) -> None:
    (_, output, _), (_, its_output, _) = run(tmp_path, "--keep-going")
    assert "c10d::allreduce_.default received inf from another rank" in output
    assert "  rank    0\n" in output
    assert "another rank" not in its_output
    assert its_output.index("of aten::sqrt.default") < its_output.index("sum False")  # reported immediately
