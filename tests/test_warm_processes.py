"""A forked process reports how it ended, as one started by ``subprocess`` does."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import warm_processes
from tests.copied_process import copy_is_kept
from tests.process_groups import destroy


def speak() -> None:
    loaded = ["amp_plugin.kernels" in sys.modules, "torch" in sys.modules]
    print("output", os.environ["SAID"], Path.cwd().name, *loaded)
    print("errors", file=sys.stderr)


def fail() -> None:
    raise ValueError("of the test")


def leave() -> None:
    sys.exit("no more")


def stay() -> None:
    print("here", os.getpid(), file=sys.stderr, flush=True)
    time.sleep(600)


def spawn() -> None:
    for task in (speak, leave, fail):
        process = multiprocessing.get_context("spawn").Process(target=task)
        process.start()
        process.join()
        print("ended with", process.exitcode, flush=True)


def sum_of_ranks() -> None:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + int(os.environ["SUMMAND"]))
    dist.all_reduce(total)
    print(total.item(), "of", dist.get_world_size())
    destroy()


@pytest.fixture(params=[False, True], ids=["with torch", "with all that tests import"])
def frameworks(request: pytest.FixtureRequest) -> bool:
    if request.param and not copy_is_kept():
        pytest.skip("no copies of a process that has a GPU")
    return request.param


def test_output_errors_environment_and_folder(tmp_path: Path, frameworks: bool) -> None:
    answer = warm_processes.call(speak, environment={"SAID": "yes"}, folder=tmp_path, frameworks=frameworks)
    assert (answer.returncode, answer.stderr) == (0, "errors\n")
    assert answer.stdout == f"output yes {tmp_path.name} {frameworks} True\n"
    assert "SAID" not in os.environ


def test_what_is_spawned_in_a_copy_is_a_copy_too(tmp_path: Path) -> None:
    if not copy_is_kept():
        pytest.skip("no copies of a process that has a GPU")
    answer = warm_processes.call(spawn, environment={"SAID": "yes"}, folder=tmp_path, frameworks=True)
    said, *ended = answer.stdout.splitlines()
    assert said == f"output yes {tmp_path.name} True True", answer.stderr
    assert ended == [f"ended with {status}" for status in (0, 1, 1)]
    assert answer.stderr.startswith("errors\nno more\n")
    assert answer.stderr.endswith("ValueError: of the test\n")


def test_an_error_is_told_with_the_exit_status(frameworks: bool) -> None:
    answer = warm_processes.call(fail, frameworks=frameworks)
    assert answer.returncode == 1
    assert answer.stderr.endswith("ValueError: of the test\n")
    answer = warm_processes.call(leave, frameworks=frameworks)
    assert (answer.returncode, answer.stderr) == (1, "no more\n")


def test_what_does_not_end_is_killed(frameworks: bool) -> None:
    process = warm_processes.WarmProcess(stay, frameworks=frameworks)
    deadline = time.monotonic() + 60
    while not process.errors() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        process.wait(0.01)
    said, pid = caught.value.stderr.split()
    assert said == "here"
    assert not Path("/proc", pid).exists()


def test_ranks_find_each_other_as_under_torchrun() -> None:
    answers = warm_processes.call_on_ranks(2, 60, sum_of_ranks, SUMMAND="3")
    assert [answer.stdout for answer in answers] == ["7 of 2\n"] * 2, [answer.stderr for answer in answers]
