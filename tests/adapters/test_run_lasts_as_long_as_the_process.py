"""`amp-plugin run` begins when the program imports torch. It ends with the process, as the program does."""

import contextlib
import pickle
import pickletools
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.adapters.takeover import Takeover
from amp_plugin.program import main_restored, program_named, run_program
from tests.adapters.commands import run_unedited
from tests.commands import with_entry_points

PROGRAM = """
import atexit, os, sys, threading, time
assert "torch" not in sys.modules and "amp_plugin.casting.rules" not in sys.modules
os.environ["ATEN_CPU_CAPABILITY"] = "default"; os.environ["OMP_NUM_THREADS"] = "3"; os.environ["PYTORCH_JIT"] = "0"
import torch
print(torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), torch.jit._state._enabled.enabled)
print(sys.argv, __name__, __file__, __spec__, __package__)

class Net(torch.nn.Linear):
    pass

def train():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    import helper
    torch.save(Net(2, 2), "thread.pt")
    print("saved in a thread", sys.argv, torch.amp.GradScaler("cpu").get_scale())

@atexit.register
def save():
    torch.save(Net(2, 2), "at_exit.pt")
    print("saved at exit", torch.amp.GradScaler("cpu").get_scale())

threading.Thread(target=train).start()
"""
PACKAGE = """
import sys
print(sys.argv[1:], __name__, __package__, __spec__.name, __file__ == sys.argv[0])
from . import part
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(PROGRAM)
    (tmp_path / "scripts" / "helper.py").touch()
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").touch()
    (tmp_path / "trainers" / "__main__.py").write_text(PACKAGE)
    (tmp_path / "trainers" / "part.py").write_text("print('part')")
    return tmp_path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**with_entry_points(folder / str(len(words))), "AMP_PLUGIN_INIT_SCALE": "16"}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_program_finds_what_it_finds_without_the_command(folder: Path) -> None:
    """Its argv, threads, atexit handlers, and settings made before it imports torch are unchanged."""
    plain = python(folder, "scripts/train.py", "--lr", "3")
    ours = python(folder, "-m", "amp_plugin", "run", "scripts/train.py", "--lr", "3")
    assert plain.stdout.count("65536.0") == 2, plain.stderr
    assert ours.stdout == plain.stdout.replace("65536.0", "16.0"), ours.stderr
    assert {"thread.pt", "at_exit.pt"} <= {path.name for path in folder.iterdir()}
    assert ours.stderr.splitlines()[-1].startswith("amp-plugin run: train.py used GradScaler")


def run_here(name: str, *arguments: str, as_module: bool = False) -> tuple[int, bool]:
    with main_restored():
        return run_program(program_named(name, as_module=as_module), arguments, contextlib.nullcontext())


def test_a_package_is_run_as_python_runs_it(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    assert run_here("trainers", "--lr", "3", as_module=True) == (0, False)
    assert capsys.readouterr().out == "['--lr', '3'] __main__ trainers trainers.__main__ True\npart\n"
    assert sys.modules["__main__"].__name__ == "__main__"


def test_archives_and_compiled_files_run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    Path("text.py").write_text("import sys; print(sys.argv)")
    py_compile.compile("text.py", "text.pyc")
    with zipfile.ZipFile("text.pyz", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.argv)")
    for name in ("./text.py", "text.pyc", "text.pyz"):
        assert run_here(name, "x") == (0, False)
        assert capsys.readouterr().out == f"[{name!r}, 'x']\n"


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_is_pickled_as_torchs(protocol: int, enabled: bool) -> None:
    with Takeover("a test"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7, enabled=enabled)
        scaler.note = "the program's"
        stored = pickle.dumps(scaler, protocol)
        loaded = pickle.loads(stored)
        own = pickle.loads(pickle.dumps(GradScaler("cpu", init_scale=4.0), protocol))
    words = " ".join(str(argument) for _, argument, _ in pickletools.genops(stored))
    assert "amp_plugin" not in words
    assert isinstance(loaded, GradScaler)
    assert isinstance(own, GradScaler)
    assert own.get_scale() == 4.0
    without = pickle.loads(stored)
    assert type(without) is torch.amp.GradScaler
    assert loaded.note == without.note == "the program's"
    assert without.state_dict().items() <= loaded.state_dict().items()
    assert without.is_enabled() is loaded.is_enabled() is enabled
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    without.scale(weight.sum()).backward()
    without.step(optimizer)
    without.update()
    assert weight.tolist() == [0.0, 0.0]


class Counting(torch.amp.GradScaler):
    steps = 0


def test_a_subclass_is_pickled_as_the_programs_class() -> None:
    with Takeover("a test"):
        scaler = Counting("cpu", init_scale=8.0)
        scaler.steps = 3
        stored = pickle.dumps(scaler)
    without = pickle.loads(stored)
    assert (type(without), without.steps, without.get_scale()) == (Counting, 3, 8.0)


STORED = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.ones(1, 2)).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
schedule.step()
torch.save([model, optimizer, schedule, scaler], "whole.pt")
"""


def test_nothing_that_a_program_stores_needs_this_package(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STORED)
    done = run_unedited("train.py", environment={}, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"amp_plugin" not in (tmp_path / "whole.pt").read_bytes()


FP16_BLOCK = "torch.amp.GradScaler('cpu'); torch.autocast('cpu', dtype=torch.float16).__enter__(); "


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (
            "scaler = torch.amp.GradScaler('cpu', enabled=False)",
            "--precision bf16 had no effect: train.py opened no",
        ),
        (
            "torch.autocast('cpu', enabled=False).__enter__(); torch.amp.GradScaler('cpu')",
            "--precision bf16 had no effect",
        ),
        (
            "torch.autocast('cpu', dtype=torch.float32, enabled=True).__init__",
            "amp_plugin replaced nothing in this process",
        ),
        ("torch.autocast('cpu').__enter__()", "train.py used torch.autocast in bf16"),
        ("torch.cpu.amp.autocast().__enter__()", "train.py used torch.autocast in bf16"),
        ("torch.autocast('cpu', dtype=torch.bfloat16).__enter__()", "train.py used torch.autocast in bf16"),
        (
            f"{FP16_BLOCK}torch.autocast('cpu').__enter__()",
            "train.py used torch.autocast in bf16, torch.autocast in fp16, GradScaler",
        ),
        (
            FP16_BLOCK,
            "--precision bf16 had no effect: each block of torch.autocast in train.py names its dtype",
        ),
        (
            f"{FP16_BLOCK}torch.autocast('cpu', enabled=False); torch.autocast('cpu', torch.bfloat16).__enter__()",
            "--precision bf16 had no effect: each block of torch.autocast in train.py names its dtype",
        ),
    ],
)
def test_a_precision_that_sets_nothing_is_told(tmp_path: Path, text: str, last: str) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{text}")
    done = run_unedited("--precision", "bf16", "train.py", environment={}, folder=tmp_path)
    said = [line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("amp-plugin run")]
    assert said[-1].startswith(last)
    assert ("train.py used GradScaler (disabled)" in said) is ("enabled=False)" in text.rpartition(";")[2])


@pytest.mark.parametrize(("fast", "lines"), [(False, 1), (True, 0), (None, 0)])
def test_slow_float16_is_told_at_the_first_block(fast: bool | None, lines: int, monkeypatch, capsys) -> None:
    monkeypatch.setattr("amp_plugin.hardware.is_fast", lambda precision, device, _=0: fast)
    with Takeover("a test"):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16), torch.autocast("cpu", dtype=torch.bfloat16):
                pass
    assert capsys.readouterr().err.count("fp16 is not fast on this cpu") == lines


def test_rules_that_are_none_end_the_process_with_2(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: {aten::mumul: fp32}\n")
    (tmp_path / "train.py").write_text("import os, torch; print('it ran')")
    done = run_unedited("--rules", "rules.yaml", "train.py", environment={}, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "amp-plugin run: error: rules.yaml: " in done.stderr
