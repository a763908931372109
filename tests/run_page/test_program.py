"""`amp-plugin report` makes pages for unedited programs, with our scaler and without."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from amp_plugin.adapters.takeover import end_runs
from amp_plugin.cli import app
from amp_plugin.program import main_restored
from tests.run_page.test_report import data_of, text_of

PLAIN = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(10):
    batch = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(batch)
    out.float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu")
for step in range(10):
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(torch.randn(4, 8))
    shares = out.float().sigmoid() * (step < 5)
    loss = shares.log().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
COMPILED = """
import torch, amp_plugin
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters())
scaler = amp_plugin.GradScaler("cpu")

@torch.compile(backend="aot_eager")
def train(batch):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(batch).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

for step in range(3):
    train(torch.randn(4, 8))
assert not scaler.last_step(optimizer).skipped
"""


def run(
    folder: Path, source: str, *words: str, code: int = 0, command: Sequence[str] = ("report", "--page")
) -> Path:
    script = folder / "train.py"
    script.write_text(source)
    words = ["amp-plugin", *command, str(folder / "run.html"), str(script), *words]
    with pytest.MonkeyPatch.context() as patch, main_restored():
        patch.setattr(sys, "argv", words)
        try:
            with pytest.raises(SystemExit) as ended:
                app()
        finally:
            end_runs()
    assert ended.value.code == code
    return folder / "run.html"


@pytest.mark.native
@pytest.mark.parametrize("uses_autocast", [True, False])
def test_a_program_without_a_scaler(tmp_path, capsys, uses_autocast):
    off = PLAIN.replace("torch.autocast(", "torch.autocast(enabled=False, device_type=")
    page = run(tmp_path, PLAIN if uses_autocast else off)
    said, text = " ".join(capsys.readouterr().err.split()), text_of(page)
    assert f"the run report of train.py is in {page}" in said
    # what the page uses does not count as used by the program
    assert ("train.py used none of" in said) is not uses_autocast
    curves = data_of(page)["curves"]
    assert curves["step"] == [*range(1, 11)]
    assert all(norm > 0 for norm in curves["before"])
    assert "none of 10 steps" in text
    assert ("bf16" in text) is uses_autocast
    assert "not shown" not in text


@pytest.mark.native
@pytest.mark.parametrize("command", [["report", "--page"], ["run", "--report"]], ids="_".join)
def test_a_program_with_a_scaler(tmp_path, command):
    page = run(tmp_path, SCALED, command=command)
    data = data_of(page)
    assert data["curves"]["scale"][:5] == [2.0**16] * 5
    assert data["curves"]["loss"][0] < 0
    assert "nan in 4 gradients: 2.bias, 2.weight, 0.bias, 0.weight" in text_of(page)


@pytest.mark.native
@pytest.mark.parametrize("source", ["print('hello')", COMPILED], ids=["nothing", "compiled whole"])
def test_a_program_that_trains_nothing_that_is_seen_is_told_how_to_get_a_page(tmp_path, capsys, source):
    page = run(tmp_path, source)
    said = capsys.readouterr().err
    assert not page.exists()
    assert "called no model in training mode outside of compiled code" in said
    assert "with amp_plugin.report(scaler, model, path):" in said
    assert "without an enabled GradScaler" not in said


def test_a_program_that_failed_is_only_told_why(tmp_path, capsys):
    page = run(tmp_path, "raise KeyError('gone')", code=1)
    assert not page.exists()
    said = capsys.readouterr().err
    assert "KeyError: 'gone'" in said
    assert "no page" not in said
