"""The one command for a machine with a GPU."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from rich.console import Console

from tests import on_gpu
from tests.on_gpu import ROOT, Step, main, missing, run, steps, summary


def test_each_step_is_run_or_named():
    console = Console(width=120, file=io.StringIO())
    passes = Step(name="passes", command=(sys.executable, "-c", ""))
    fails = Step(name="fails", command=(sys.executable, "-c", "raise SystemExit(3)"))
    lacks = Step(name="lacks", command=("nothing",), needs=("pytest", "no_such_package", "/no/such/program"))
    console.print(summary([run(step) for step in (passes, fails, lacks)]))
    text = console.file.getvalue()
    assert "passed" in text
    assert "FAILED, exit status 3" in text
    assert "left out: no_such_package, /no/such/program is not installed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main() == 2
    assert "torch sees no CUDA device; make test-host-device" in capsys.readouterr().out


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    passes = Step(name="passes", command=(sys.executable, "-c", ""))
    monkeypatch.setattr(on_gpu, "steps", lambda: [passes])
    assert main() == 0
    fails = Step(name="fails", command=(sys.executable, "-c", "raise SystemExit(1)"))
    monkeypatch.setattr(on_gpu, "steps", lambda: [fails, passes])
    assert main() == 1
    assert "a GPU, torch" in capsys.readouterr().out


def test_what_the_steps_name_is_there():
    for step in steps():
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
        assert step.command[0] == sys.executable or missing(step) or step.needs
