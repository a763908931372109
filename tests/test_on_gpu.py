"""The one command for a machine with a GPU."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.__main__ import arguments
from benchmarks.catalogue import keys
from tests import on_gpu
from tests.gpu_step import ROOT, Outcome, Step, missing, run
from tests.on_gpu import main, steps, summary

# The package depends on them, or pytest does.
INSTALLED = {"filelock", "packaging", "pytest", "rich", "typer", "yaml"}


def python(name, code, **options):
    return Step(name=name, command=(sys.executable, "-c", code), **options)


PASSES = python("passes", "print('all is well')")
FAILS = python("fails", "print('all is lost'); raise SystemExit(3)")
LOST = "FAILED, exit status 3; its last line: all is lost"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_each_step_is_run_or_named(log):
    lacks = Step(name="lacks", command=("nothing",), needs=("pytest", "no_such_package", "/no/such/program"))
    passed, failed, left_out = summary([run(step, log) for step in (PASSES, FAILS, lacks)]).splitlines()
    assert passed.startswith("passes ")
    assert passed.endswith("passed")
    assert failed.endswith(LOST)
    assert left_out.endswith("left out: no_such_package, /no/such/program is not installed")
    assert "all is well" in log.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "torch sees no CUDA device; make test-host-device" in capsys.readouterr().out


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """Runs the given steps as on a machine with a GPU; the results lie in the folder ``kept``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def ran(*words, of=(FAILS, PASSES)):
        monkeypatch.setattr(on_gpu, "steps", lambda: list(of))
        return main([*words, "--results", str(tmp_path / "kept")])

    return ran


def kept(tmp_path):
    return {
        data["name"]: data["verdict"]
        for data in json.loads((tmp_path / "kept" / "outcomes.json").read_text())
    }


def test_a_failure_is_the_exit_status(on_a_gpu, capsys):
    assert on_a_gpu(of=[PASSES]) == 0
    assert on_a_gpu() == 1
    said = capsys.readouterr().out
    assert "a GPU, torch" in said
    assert said.index("fails: FAILED, exit status 3") < said.rindex("passes: ")  # told as it ends


def test_some_steps_are_asked_for_by_name_and_others_keep_their_outcome(on_a_gpu, capsys, tmp_path):
    assert on_a_gpu("passes") == 0
    assert "fails" not in capsys.readouterr().out
    assert on_a_gpu("fails") == 1
    assert kept(tmp_path) == {
        "fails": LOST,
        "passes": "passed",
    }  # in the order of the steps
    with pytest.raises(SystemExit):
        on_a_gpu("pases")
    assert "there is no step pases; there are fails, passes" in capsys.readouterr().err


def test_the_rest_is_what_has_no_outcome_yet(on_a_gpu, capsys, tmp_path):
    slow = python("slow", "import time; time.sleep(60)", limit=100.0)
    assert on_a_gpu("--within", "31", "--limit", "0.3", of=[PASSES, slow]) == 1
    assert kept(tmp_path)["slow"].startswith("cut off after 0 s")
    capsys.readouterr()
    quick = replace(PASSES, name="slow")
    assert on_a_gpu("--rest", of=[PASSES, quick]) == 0
    assert "\npasses: " not in capsys.readouterr().out
    assert kept(tmp_path) == {"passes": "passed", "slow": "passed"}


def test_the_first_ten_minutes_are_asked_for_by_one_name(on_a_gpu, capsys, tmp_path):
    first, later = replace(PASSES, name="first-load"), PASSES
    assert on_a_gpu("first-ten-minutes", of=[later, first, replace(FAILS, name="memcheck")]) == 1
    assert kept(tmp_path) == {"first-load": "passed", "memcheck": LOST}


def test_they_come_first_and_take_ten_minutes():
    """On a GPU; the limits are for one that hangs, or compiles for the first time."""
    names = [step.name for step in steps()]
    assert tuple(names[: len(on_gpu.FIRST_STEPS)]) == on_gpu.FIRST_STEPS
    assert names[0] == "first-versions"


def test_the_folder_of_results_is_outside_of_the_work_tree_and_gives_figures_back(
    on_a_gpu, monkeypatch, tmp_path, capsys
):
    assert not on_gpu.asked_for([]).results.is_relative_to(ROOT)
    figures, folder = tmp_path / "figures", tmp_path / "kept"
    monkeypatch.setattr(on_gpu, "FIGURES", figures)
    folder.mkdir()
    (folder / "nvidia-h200.json").write_text("[1]")
    assert (
        on_a_gpu(
            "--rest", of=[python("promises", f"print(open({str(figures / 'nvidia-h200.json')!r}).read())")]
        )
        == 0
    )
    assert "\n[1]\n" in (folder / "on-gpu.log").read_text()


def test_a_step_is_told_where_the_results_go(on_a_gpu, tmp_path):
    writes = "import sys, pathlib; pathlib.Path(sys.argv[1], 'first-it.json').write_text('{}')"
    step = Step(name="first-it", command=(sys.executable, "-c", writes, "{results}"))
    assert on_a_gpu(of=[step]) == 0
    assert (tmp_path / "kept" / "first-it.json").exists()


def test_one_slow_test_does_not_end_its_step(tmp_path, log):
    (tmp_path / "test_it.py").write_text("import time\ndef test_slow(): time.sleep(9)\ndef test_next(): pass")
    words = [str(word) for word in on_gpu.pytest_over(str(tmp_path), marked="") if word != "tests.gpu_files"]
    words[words.index("--timeout") + 1] = "1"
    del words[words.index("-p")]
    outcome = run(Step(name="tests", command=(*words, "--noconftest", "-c", "/dev/null")), log)
    assert outcome.verdict == "FAILED, exit status 1: 1 passed, 1 failed, 0 skipped"


def test_what_does_not_fit_into_the_time_is_left(on_a_gpu, capsys, tmp_path):
    assert on_a_gpu("--within", "5", of=[replace(PASSES, limit=4.0), replace(FAILS, limit=100.0)]) == 0
    assert "fails: not begun, " in capsys.readouterr().out
    assert kept(tmp_path) == {"passes": "passed"}


def test_an_outcome_is_kept_before_the_next_step_begins(on_a_gpu, tmp_path):
    looks = f"print(open({str(tmp_path / 'kept' / 'outcomes.json')!r}).read())"
    assert on_a_gpu(of=[PASSES, python("looks", looks)]) == 0
    assert '"verdict": "passed"' in (tmp_path / "kept" / "on-gpu.log").read_text()
    assert "passes" in (tmp_path / "kept" / "summary.txt").read_text()


def test_figures_come_back_with_the_outcomes(on_a_gpu, monkeypatch, tmp_path):
    figures = tmp_path / "figures"
    figures.mkdir()
    monkeypatch.setattr(on_gpu, "FIGURES", figures)
    assert on_a_gpu(of=[python("bandwidth", f"open({str(figures / 'gpu.json')!r}, 'w').write('[]')")]) == 0
    assert (tmp_path / "kept" / "gpu.json").read_text() == "[]"


def test_a_step_that_hangs_is_ended_with_all_it_started(log, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'a').write('.'); time.sleep(0.05)"
    code = f"import subprocess, sys; print('in the middle', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(python("hangs", code, limit=2.0), log)
    assert outcome.verdict == "FAILED, ended after 2 s; its last line: in the middle"
    assert outcome.failed
    length = len(alive.read_text())
    time.sleep(0.3)
    assert len(alive.read_text()) == length


def test_what_the_sanitizer_says_last_is_in_the_verdict(log):
    says = "print('========= ERROR SUMMARY: 2 errors'); raise SystemExit(9)"
    assert run(python("memcheck", says), log).verdict == "FAILED, exit status 9; ERROR SUMMARY: 2 errors"


def test_promises_that_are_missed_are_named(log):
    says = "print('kept  T: a: 1\\nMISSED  T: b: 2\\nkept  T: c: 3'); raise SystemExit(1)"
    assert run(python("promises", says), log).failures == ("MISSED  T: b: 2",)


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("def test_a(): pass\ndef test_b(): pytest.skip()", "passed: 1 passed, 0 failed, 1 skipped"),
        ("def test_b(): pytest.skip()", "FAILED, nothing ran: 0 passed, 0 failed, 1 skipped"),
        ("def test_a(): pass\ndef test_c(): 1 / 0", "FAILED, exit status 1: 1 passed, 1 failed, 0 skipped"),
        ("import no_such_package", "FAILED, exit status 2: 0 passed, 1 failed, 0 skipped"),
        ("import os; os._exit(5)", "FAILED, exit status 5, and no test ran"),
    ],
    ids=["passes", "skips", "fails", "cannot be read", "dies"],
)
def test_a_step_without_a_test_that_ran_has_failed(lines, verdict, tmp_path, log):
    (tmp_path / "test_it.py").write_text(f"import pytest\n{lines}")
    (tmp_path / "none.ini").touch()
    alone = (
        "--noconftest",
        "--disable-plugin-autoload",
        "-p",
        "no:cacheprovider",
        "-c",
        tmp_path / "none.ini",
    )
    step = Step(name="tests", command=(sys.executable, "-m", "pytest", *map(str, alone), str(tmp_path)))
    outcome = run(step, log)
    assert outcome.verdict == verdict
    if "test_c" in lines:
        (failure,) = outcome.failures
        assert failure.endswith("test_it::test_c: ZeroDivisionError: division by zero")


def test_a_summary_stays_short():
    """Where all steps fail, in many tests each, it is read where only the last 12 000 characters are shown."""
    failures = tuple(f"tests.kernels.test_it::test_{i}: {'x' * 160}" for i in range(8))
    text = summary([Outcome(name="step", verdict="FAILED " * 30, failures=failures) for _ in steps()])
    assert text.count("and others; outcomes.json names 8") == len(steps())
    assert len(text) < 12_000


def test_what_the_steps_name_is_there():
    for step in steps():
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
        assert step.command[0] == sys.executable or missing(step) or step.needs


def test_steps_have_names_of_their_own_and_fit_a_command_of_ten_minutes():
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    assert max(step.limit for step in steps()) <= 300
    assert names.index("clipping") < names.index("promises") < names.index("racecheck")


def test_the_benchmarks_understand_their_steps():
    measured = []
    for step in steps():
        if "benchmarks" in step.command:
            options = arguments("cuda", step.command[step.command.index("benchmarks") + 1 :])
            assert options.keep or options.promises
            measured += options.only if options.keep else []
    assert sorted([*measured, "host"]) == sorted(keys("cuda"))  # host needs no GPU


def test_the_doctor_is_asked():
    (step,) = (step for step in steps() if step.name == "doctor")
    ran = subprocess.run((*step.command, "--help"), cwd=ROOT, capture_output=True, text=True, check=True)
    assert "doctor" in ran.stdout


@pytest.mark.parametrize(
    "step",
    [step for step in steps() if "pytest" in step.command and "--tool" not in step.command],
    ids=lambda step: step.name,
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
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted((ROOT / "tests").rglob("*.py"))
    }
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
