"""record_run and compare_runs on two ranks write one file per rank, and name the rank and the layer that
differ.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_plugin.cli import app
from amp_plugin.numerics.compare import Run, compare_runs, record_run
from amp_plugin.numerics.parts import part_of
from amp_plugin.numerics.rank_files import MANIFEST, RankFile, missing_ranks, recorded_files
from amp_plugin.numerics.recorded import Weight
from amp_plugin.numerics.replicas import replicas_of, unlike_the_others
from amp_plugin.numerics.values import fingerprint
from tests.commands import amp
from tests.process_groups import leave
from tests.warm_processes import call_on_ranks

SECONDS = 120  # much shorter than the half hour that gloo waits for a rank that does not answer


class Net(nn.Module):
    """Layers of the same shape, so that results cannot be matched by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        return self.last(hidden * factor)


def train(folder: Path) -> None:
    """Record several runs on this rank, each into the folder with its name."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for name, options in RUNS.items():
        record(folder / f"{name}.amp", rank, **options)
    for is_summed in (True, False):
        record_sum(folder / f"{'summed' if is_summed else 'partial'}.amp", rank, is_summed=is_summed)
    leave()


def record_sum(path: Path, rank: int, *, is_summed: bool) -> None:
    """Record a run whose forward pass adds up over the ranks, as row-parallel layers do."""
    torch.manual_seed(rank)
    with record_run(path):
        part = torch.randn(8).tanh()
        if is_summed:
            dist.all_reduce(part)
        part * 2


RUNS = {
    "healthy": {},
    "bf16": {"enabled": True},
    "ignored": {"ignored": "middle"},  # DDP does not reduce this layer's gradients
    "factor": {"factor": 1.1},  # only rank 1 computes differently
    "by_hand": {"by_hand": True},
    "sharded": {"sharded": True},
    "forgotten": {"by_hand": True, "ignored": "middle"},
}


def record(
    path: Path,
    rank: int,
    *,
    enabled: bool = False,
    ignored: str = "",
    factor: float = 1.0,
    by_hand: bool = False,
    sharded: bool = False,
) -> None:
    torch.manual_seed(0)
    net = Net()
    left_out = {name for name, _ in net.named_parameters() if ignored and name.startswith(ignored)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, left_out)
    model = net if by_hand or sharded else DistributedDataParallel(net)
    if sharded:
        fully_shard(net, mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    with record_run(path, steps=3):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model(torch.randn(4, 8), factor if rank else 1.0).float().square().mean()
            loss.backward()
            for name, weight in net.named_parameters() if by_hand else ():
                if name not in left_out:
                    dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for rank in call_on_ranks(2, SECONDS, train, folder):
        assert rank.returncode == 0, rank.stderr
    return folder


@pytest.mark.dist
def test_each_rank_writes_a_file_and_both_the_manifest(runs: Path) -> None:
    folder = runs / "healthy.amp"
    assert sorted(file.name for file in folder.iterdir()) == [MANIFEST, "rank-0.amp", "rank-1.amp"]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["world_size"] == 2
    assert manifest["files"] == ["rank-0.amp", "rank-1.amp"]
    assert manifest["mesh"] == {}
    assert json.loads((runs / "sharded.amp" / MANIFEST).read_text())["mesh"] == {"data": 2}
    assert (folder / "rank-0.amp").read_bytes() != (folder / "rank-1.amp").read_bytes()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("healthy", "healthy"),
        ("bf16", "healthy"),
        ("bf16", "bf16"),
        ("by_hand", "by_hand"),
        ("sharded", "sharded"),
    ],
)
def test_a_healthy_run_is_silent(runs: Path, first: str, second: str) -> None:
    found = compare_runs(runs / f"{first}.amp", runs / f"{second}.amp")
    assert found.is_clean, found.report()
    assert found.ranks == (0, 1)
    if first == second:
        assert found.differing == 0
    assert len(Run.load(runs / f"{first}.amp" / "rank-1.amp").gradients) == 3 * 6  # steps, weights


@pytest.mark.dist
@pytest.mark.parametrize(("first", "second"), [("healthy", "ignored"), ("by_hand", "forgotten")])
def test_a_missing_all_reduce_is_named(runs: Path, first: str, second: str) -> None:
    found = compare_runs(runs / f"{first}.amp", runs / f"{second}.amp")
    assert found.unexplained is not None
    module, weights = "Net.middle", ("gradient of weight", "gradient of bias")
    assert found.unexplained.module == module, found.report()
    assert found.unexplained.op in weights
    assert found.unexplained.ranks == (0, 1)
    assert ", step 0," in found.unexplained.result
    assert not found.replicas_first
    assert {(unlike.module, unlike.op) for unlike in found.replicas_second} == {
        (module, name) for name in weights
    }
    assert all(unlike.ranks == (0, 1) for unlike in found.replicas_second)
    assert "ranks of the second run differ where they must agree: gradient of" in found.report()


@pytest.mark.dist
def test_a_missing_sum_in_a_forward_pass_is_named(runs: Path) -> None:
    one = compare_runs(runs / "summed.amp", runs / "partial.amp" / ".." / "summed.amp")
    assert one.is_clean
    assert one.report().endswith("ranks 0, 1 are compared with each other; they agree where they must agree")
    found = compare_runs(runs / "summed.amp", runs / "partial.amp").unexplained
    assert found is not None
    assert found.op == "aten::mul.Tensor"
    assert found.reason.startswith(
        "an input comes from c10d::allreduce_.default, forward, step 0, float32[8]"
    )
    ranks = [Run.load(runs / "summed.amp" / f"rank-{rank}.amp").records for rank in range(2)]
    sums = [next(record for record in records if "allreduce" in record.op) for records in ranks]
    assert sums[0].held.sketch == sums[1].held.sketch  # both ranks read the result after it had arrived


@pytest.mark.dist
def test_replicas_are_compared_in_one_recording_alone(runs: Path) -> None:
    found = compare_runs(runs / "ignored.amp", runs / "ignored.amp")
    assert found.differing == 0
    assert [unlike.module for unlike in found.replicas_first] == ["Net.middle"] * 2
    result = amp("compare", "--json", str(runs / "ignored.amp"), str(runs / "ignored.amp"))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["replicas_first"][0]["ranks"] == [0, 1]
    assert not found.replicas_second
    headline, *findings = found.report().split("\n\n")
    assert headline == "one recording was given twice, so ranks 0, 1 are compared with each other"
    assert len(findings) == 2
    assert all(finding.startswith("ranks of the recording differ where they must") for finding in findings)


@pytest.mark.dist
def test_the_rank_that_computes_otherwise_is_named_and_not_the_one_that_receives_it(runs: Path) -> None:
    found = compare_runs(runs / "healthy.amp", runs / "factor.amp").unexplained
    assert found is not None
    assert found.ranks == (1,)
    assert (found.module, found.op) == ("Net", "aten::mul.Tensor")
    assert "\n  rank        1\n" in str(found)
    result = amp("compare", str(runs / "healthy.amp"), str(runs / "factor.amp"))
    assert result.exit_code == 1
    assert f"{Path(__file__).name}:" in result.stdout


SCRIPT = """\
import os, signal, sys, torch
import torch.distributed as dist

rank, dying = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if rank == 1 and step == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def diagnose(words: list[str]) -> None:
    """Do what the command ``amp-plugin diagnose`` does."""
    sys.argv = ["amp-plugin", "diagnose", *words]
    app()


@pytest.mark.dist
@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_is_killed_leaves_the_other_ones_recording(tmp_path: Path, dying: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole, cut, output = tmp_path / "whole.amp", tmp_path / "cut.amp", ""
    for path, at in ((whole, 9), (cut, dying)):
        words = ["--save", str(path), str(script), str(at)]
        ranks = call_on_ranks(2, SECONDS, diagnose, words, COLUMNS="300", NO_COLOR="1")
        killed = -signal.SIGKILL if at == dying else 0
        assert ranks[1].returncode == killed, ranks[1].stderr
        output = output or ranks[0].stdout
    assert f"results of 3 optimizer steps are in {whole / 'rank-0.amp'}" in output
    result = amp("compare", str(whole), str(cut))
    assert result.exit_code == 1, result.output
    if dying:
        assert "ranks 0, 1 of the second run are cut off (the program was killed" in result.stdout
    else:
        assert "rank 1 of the second run is missing (no file was written)" in result.stdout
        assert "results compared on rank 0," in result.stdout


def test_files_of_an_earlier_recording_are_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run.amp"
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        file = RankFile(folder)
        file.settle()
        file.write(lambda path: path.write_text("old"))
    assert missing_ranks(recorded_files(folder)) == ()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    RankFile(folder).settle()  # from a rank that dies before it writes its file
    assert missing_ranks(recorded_files(folder)) == (1,)


def test_a_folder_and_a_file_do_not_replace_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.amp").mkdir()
    (tmp_path / "file.amp").write_text("a recording")
    with pytest.raises(FileExistsError, match="is a folder"), record_run(tmp_path / "folder.amp"):
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FileExistsError, match="is a file"), record_run(tmp_path / "file.amp"):
        pass
    with pytest.raises(ValueError, match="not the folder of a recorded run"):
        compare_runs(tmp_path / "folder.amp", tmp_path / "folder.amp")


def test_which_weights_are_replicas() -> None:
    def weight(*numbers: float) -> Weight:
        values = torch.tensor(numbers, dtype=torch.float64)
        return Weight("float64", fingerprint(values), part_of(values), is_constant=len(set(numbers)) == 1)

    same, other, zeros = weight(1, 2), weight(1, 3), weight(0, 0)
    shared = {"plain.weight": same, "plain.bias": zeros, "shard.bias": zeros}
    mine, its = shared | {"shard.weight": same}, shared | {"shard.weight": other}
    assert replicas_of([mine, its]) == {"plain.weight", "plain.bias"}
    assert replicas_of([mine, mine]) == set(mine)
    assert replicas_of([mine]) == set()
    norm = {"norm.weight": zeros}
    assert "norm.weight" in replicas_of([mine | norm, mine | norm])
    assert "norm.weight" not in replicas_of([mine | norm, its | norm])


def test_the_rank_that_is_unlike_most_is_named() -> None:
    assert unlike_the_others({0: 7, 1: 7, 2: 8}) == (2,)
    assert unlike_the_others({0: 7, 1: 8}) == (0, 1)
    assert unlike_the_others({0: 7, 1: 7}) == ()
