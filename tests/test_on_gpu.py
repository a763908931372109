"""The command that runs all checks on a machine with a GPU."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from benchmarks.__main__ import arguments
from benchmarks.catalogue import keys
from tests import on_gpu
from tests.on_gpu import ROOT, Step, main, run, steps


def python(name, code, **options):
    return Step(name=name, command=(sys.executable, "-c", code), **options)


PASSES = python("passes", "print('all is well')")
FAILS = python("fails", "print('all is lost'); raise SystemExit(3)")
PASSED, LOST = "passed: all is well", "FAILED, exit status 3: all is lost"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "torch sees no CUDA device; make test-host-device" in capsys.readouterr().out


def test_recipes_of_several_processes_take_one_where_there_is_one_gpu():
    words = {step.name: step.command for step in steps() if step.name.startswith("recipe-")}
    assert {name for name, command in words.items() if "processes=1" in command} == {
        "recipe-ddp",
        "recipe-fsdp2",
        "recipe-fsdp2_exact_bf16",
    }


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """Run steps as on a machine with a GPU. Results go to ``kept``, figures to ``figures``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(on_gpu, "FIGURES", tmp_path / "figures")

    def ran(*words, of=(FAILS, PASSES)):
        monkeypatch.setattr(on_gpu, "steps", lambda: list(of))
        return main([*words, "--results", str(tmp_path / "kept")])

    return ran


def kept(tmp_path):
    parts = json.loads((tmp_path / "kept" / "gpu.json").read_text())["parts"]
    return {part["name"]: part["verdict"] for part in parts}


def test_what_a_machine_lacks_is_left_out_and_no_failure(on_a_gpu, capsys):
    lacks = Step(name="lacks", command=("nothing",), needs=("pytest", "no_such_package", "/no/such/program"))
    assert on_a_gpu(of=[PASSES, lacks]) == 0
    assert "left out: no_such_package, /no/such/program is not installed" in capsys.readouterr().out


def test_some_steps_are_asked_for_by_name_and_others_keep_their_outcome(on_a_gpu, capsys, tmp_path):
    assert on_a_gpu("passes") == 0
    assert "fails" not in capsys.readouterr().out
    assert on_a_gpu("fails") == 1
    told, summary = capsys.readouterr().out.split("a GPU, torch")
    assert LOST in told  # at its end
    assert LOST in summary
    assert kept(tmp_path) == {"passes": PASSED, "fails": LOST}
    with pytest.raises(SystemExit):
        on_a_gpu("pases")
    assert "invalid choice: 'pases'" in capsys.readouterr().err


def test_the_rest_is_what_has_no_outcome_yet(on_a_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(on_gpu, "LEAST", 0.5)
    slow = python("slow", "import time; time.sleep(60)", limit=100.0)
    assert on_a_gpu("--within", "2", of=[PASSES, slow, FAILS]) == 1
    assert "fails: not begun, 0 s are left" in capsys.readouterr().out
    assert kept(tmp_path)["slow"].startswith("cut off after ")
    assert on_a_gpu("--rest", of=[replace(PASSES, command=FAILS.command), replace(PASSES, name="slow")]) == 0
    assert kept(tmp_path) == {"passes": PASSED, "slow": PASSED}


def test_the_first_ten_minutes_are_asked_for_by_one_name_and_fit(on_a_gpu, tmp_path):
    """Ops run first, then what is timed, then the rest in parallel.

    The seconds are those in docs/lab/cuda.md.
    """
    names = [step.name for step in steps()]
    asked = on_gpu.asked_for(["first-ten-minutes"], names)
    assert asked.within == 480.0
    assert asked.only[0] == "first-ops"
    chosen = [step for step in steps() if step.name in asked.only]
    alone = [step.alone for step in chosen]
    assert alone == sorted(alone, reverse=True)
    timed = {step.name for step in steps() if "benchmarks" in step.command}
    assert timed <= {step.name for step in chosen if step.alone}
    sweep, part = replace(PASSES, name="first-sweep"), replace(PASSES, name="first-ops")
    assert on_a_gpu("first-ten-minutes", of=[part, replace(FAILS, name="memcheck"), sweep]) == 1
    assert kept(tmp_path) == {"first-ops": PASSED, "memcheck": LOST}


def test_what_is_timed_runs_alone_and_the_rest_side_by_side(on_a_gpu, tmp_path):
    """Each step records when it starts and ends."""
    seen = tmp_path / "seen"
    code = (
        f"import time; say = lambda w: open({str(seen)!r}, 'a').write(w); say('<'); time.sleep(0.5); say('>')"
    )
    alone = [python(f"alone {i}", code) for i in range(2)]
    beside = [python(f"beside {i}", code, alone=False) for i in range(2)]
    assert on_a_gpu("--jobs", "2", of=[alone[0], *beside, alone[1]]) == 0
    assert seen.read_text() == "<><><<>>"
    seen.unlink()
    assert on_a_gpu("--jobs", "1", of=beside) == 0
    assert seen.read_text() == "<><>"


def test_a_package_named_tests_elsewhere_on_the_path_is_not_taken(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("raise SystemExit('another package')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import tests; print(tests.__path__[0])"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "tests"), done.stderr


def test_it_needs_no_package_of_the_recipes(tmp_path):
    """A machine with a GPU may have only torch and pytest. Recipes do not run there."""
    (tmp_path / "omegaconf.py").write_text("raise ModuleNotFoundError('no omegaconf here')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", "import tests.on_gpu as it; print(len(it.steps()))"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(len(steps())), done.stderr


def test_only_a_step_that_runs_alone_compares_the_free_memory_of_the_card():
    told = {step.name for step in steps() if ("ALONE_ON_THE_GPU", "1") in step.environment}
    assert "first-graphs" in told
    assert all(step.alone for step in steps() if step.name in told)


def test_outcomes_and_figures_are_kept_at_once_and_a_work_tree_that_was_replaced_has_them_back(
    on_a_gpu, tmp_path
):
    assert not on_gpu.asked_for([], []).results.is_relative_to(ROOT)
    figures, folder = tmp_path / "figures" / "nvidia-h200.json", tmp_path / "kept"
    text = json.dumps({"machine": "a GPU", "torch": torch.__version__, "sections": [1]})
    measures = python("bandwidth", f"open({str(figures)!r}, 'w').write({text!r})")
    looks = f"print([open({str(folder)!r} + name).read() for name in ('/gpu.json', '/{figures.name}')])"
    assert on_a_gpu(of=[measures, python("looks", looks)]) == 0
    assert '"name": "bandwidth"' in kept(tmp_path)["looks"]
    assert '"sections": [1]' in kept(tmp_path)["looks"]
    assert json.loads((folder / "gpu.json").read_text())["sections"] == [1]
    figures.unlink()
    assert on_a_gpu("--rest", of=[python("promises", f"print(open({str(figures)!r}).read())")]) == 0
    assert kept(tmp_path)["promises"] == f"passed: {text}"


def test_a_step_that_hangs_is_ended_with_all_it_started(log, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'a').write('.'); time.sleep(0.05)"
    code = f"import subprocess, sys; print('in it', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(python("hangs", code, limit=1.0), log, limit=9.0)
    assert outcome.verdict == "FAILED, ended after 1 s: in it"
    length = len(alive.read_text())
    time.sleep(0.3)
    assert len(alive.read_text()) == length


def test_the_sanitizers_last_word_is_named(log):
    says = "print('========= ERROR SUMMARY: 2 errors\\nmore'); raise SystemExit(9)"
    verdict = run(python("memcheck", says), log, limit=99.0).verdict
    assert verdict == "FAILED, exit status 9: ERROR SUMMARY: 2 errors"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("def test_a(): pass\ndef test_b(): pytest.skip()", "passed: 1 passed, 1 skipped in "),
        ("def test_b(): pytest.skip()", "FAILED, exit status 0: 1 skipped in "),
        ("import no_such_package", "FAILED, exit status 1: 1 error in "),
        ("import os; os._exit(5)", "FAILED, exit status 5: collecting"),
        ("import time\ndef test_a(): time.sleep(9)\ndef test_b(): pass", "FAILED, exit status 1: 1 failed, 1 passed in "),
        ("import warnings\ndef test_a(): warnings.warn('newer', DeprecationWarning)", "passed: 1 passed, 1 warning in "),
        ("import warnings\ndef test_a(): warnings.warn('ours')", "FAILED, exit status 1: 1 failed in "),
    ],
    ids=["passes", "skips", "cannot be read", "dies", "is slow", "newer packages", "a warning"],
)  # fmt: skip
def test_a_step_without_a_test_that_ran_has_failed(lines, verdict, tmp_path, log):
    (tmp_path / "test_it.py").write_text(f"import pytest\n{lines}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    options = ("--noconftest", "-c", str(tmp_path / "pytest.ini"), "--timeout", "1")
    command = (*on_gpu.pytest_over(str(tmp_path), marked=""), *options)
    outcome = run(Step(name="tests", command=command), log, limit=99.0)
    assert outcome.verdict.startswith(verdict)


def test_steps_have_names_of_their_own_and_what_they_name_is_there():
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    assert max(step.limit for step in steps()) <= 300  # they fit into a command of ten minutes
    assert names.index("clipping") < names.index("promises") < names.index("racecheck")
    paths = [word.partition("::")[0] for step in steps() for word in step.command]
    assert all((ROOT / path).exists() for path in paths if path.startswith("tests/"))
    parts = (ROOT / on_gpu.FIRST_TESTS).read_text()
    assert all(f"def test_{part}()" in parts for part in on_gpu.PARTS)


def test_the_benchmarks_understand_their_steps():
    measured = []
    for step in steps():
        if "benchmarks" in step.command:
            options = arguments("cuda", step.command[step.command.index("benchmarks") + 1 :])
            assert options.keep or options.promises
            measured += options.only if options.keep else []
    assert sorted([*measured, "host"]) == sorted(keys("cuda"))  # "host" needs no GPU
