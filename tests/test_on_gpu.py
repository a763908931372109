"""The one command for a machine with a GPU."""

from __future__ import annotations

import ast
import io
import re
import sys

import pytest
import torch
from rich.console import Console

from tests import on_gpu
from tests.import_graph import modules_of
from tests.on_gpu import ROOT, Step, main, missing, run, steps, summary

INSTALLED = {
    "filelock",
    "packaging",
    "pytest",
    "rich",
    "typer",
    "yaml",
}  # the package depends on them, or pytest does
PASSES = Step(name="passes", command=(sys.executable, "-c", ""))
FAILS = Step(name="fails", command=(sys.executable, "-c", "raise SystemExit(3)"))


def test_each_step_is_run_or_named():
    console = Console(width=120, file=io.StringIO())
    lacks = Step(name="lacks", command=("nothing",), needs=("pytest", "no_such_package", "/no/such/program"))
    console.print(summary([run(step) for step in (PASSES, FAILS, lacks)]))
    text = console.file.getvalue()
    assert "passed" in text
    assert "FAILED, exit status 3" in text
    assert "left out: no_such_package, /no/such/program is not installed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "torch sees no CUDA device; make test-host-device" in capsys.readouterr().out


@pytest.fixture
def with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


@pytest.mark.usefixtures("with_a_gpu")
def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "steps", lambda: [PASSES])
    assert main([]) == 0
    monkeypatch.setattr(on_gpu, "steps", lambda: [FAILS, PASSES])
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "a GPU, torch" in said
    assert said.index("fails: FAILED, exit status 3") < said.rindex("passes: ")  # told as it ends


@pytest.mark.usefixtures("with_a_gpu")
def test_some_steps_are_asked_for_by_name(monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "steps", lambda: [FAILS, PASSES])
    assert main(["passes"]) == 0
    assert "fails" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["pases"])
    assert "there is no step pases; there are fails, passes" in capsys.readouterr().err


def test_a_step_that_hangs_is_ended():
    sleeps = Step(name="sleeps", command=(sys.executable, "-c", "import time; time.sleep(60)"))
    assert run(sleeps, limit=0.2).verdict == "FAILED, ended after 0 s"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("def test_a(): pass\ndef test_b(): pytest.skip()", "passed: 1 passed, 0 failed, 1 skipped"),
        ("def test_b(): pytest.skip()", "FAILED, nothing ran: 0 passed, 0 failed, 1 skipped"),
        ("def test_a(): pass\ndef test_c(): 1 / 0", "FAILED, exit status 1: 1 passed, 1 failed, 0 skipped"),
        ("import no_such_package", "FAILED, exit status 2: 0 passed, 1 failed, 0 skipped"),
    ],
    ids=["passes", "skips", "fails", "cannot be read"],
)
def test_a_step_without_a_test_that_ran_has_failed(lines, verdict, tmp_path):
    (tmp_path / "test_it.py").write_text(f"import pytest\n{lines}")
    alone = (
        "--noconftest",
        "--disable-plugin-autoload",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        tmp_path / "none.ini",
        tmp_path,
    )
    (tmp_path / "none.ini").touch()
    step = Step(name="tests", command=(sys.executable, "-m", "pytest", *map(str, alone)))
    assert run(step).verdict == verdict


def test_what_the_steps_name_is_there():
    for step in steps():
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
        assert step.command[0] == sys.executable or missing(step) or step.needs


@pytest.mark.parametrize(
    "step", [step for step in steps() if "pytest" in step.command], ids=lambda step: step.name
)
def test_a_step_needs_what_its_tests_import(step):
    """Else one package that a machine with a GPU lacks costs a file, or the step."""
    known = {
        *sys.stdlib_module_names,
        "amp_plugin",
        "benchmarks",
        "recipes",
        "tests",
        "torch",
        *step.needs,
        *INSTALLED,
    }
    folders = [ROOT / word for word in step.command if word.startswith("tests/")]
    files = {
        file
        for folder in folders
        for file in (folder.rglob("test_*.py") if folder.is_dir() else [folder])
        if "pytest.mark.gpu" in file.read_text()
    }
    assert files
    modules = modules_of(ROOT / "tests")
    for file in files:
        asked = set(re.findall(r"""importorskip\(["'](\w+)""", file.read_text()))
        found = {name.partition(".")[0] for name in imported_at_once(file, modules, set())}
        assert found <= known | asked, f"{file.relative_to(ROOT)} imports {found - known - asked}"
    private = [file.name for file in files if "from torch.testing._internal" in file.read_text()]
    assert private == [], "torchs_own() imports these without expecttest"


def imported_at_once(file, modules, seen):
    """Return the names that a file imports outside of functions, those of test modules among them followed."""
    seen.add(file)
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {member if member in modules else node.module for member in members}
    own = {modules[name] for name in names if name in modules} - seen
    return names.union(*(imported_at_once(other, modules, seen) for other in own))
