"""Programs of other libraries, from small synthetic data, under `amp-plugin run`: the losses of the bare program.

Each prints its losses as its last line. Their libraries are not among ours; what is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
from subprocess import CompletedProcess

import pytest

from tests.adapters.commands import run_unedited
from tests.warm_processes import run_program

pytestmark = [pytest.mark.whole_run, pytest.mark.slow, pytest.mark.dist]

TIMM = """
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler
torch.manual_seed(0)
model = timm.create_model("resnet18", num_classes=3, pretrained=False)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
scaler = NativeScaler(device="cpu")
x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 3, (8,))
losses = []
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    losses.append(loss.item())
print(*losses)
"""
TRANSFORMERS = """
import tempfile
import transformers
from tests.adapters.tiny_bert import bert, texts
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=8, learning_rate=5e-3, num_train_epochs=3, bf16=True, use_cpu=True,
    report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no")
trainer = transformers.Trainer(bert(layers=1), arguments, train_dataset=texts(32))
trainer.train()
print(*(line["loss"] for line in trainer.state.log_history if "loss" in line))
"""
PROGRAMS = {
    "timm": ("timm torchvision", TIMM, "torch.autocast in fp16, GradScaler"),
    "transformers": ("transformers", TRANSFORMERS, "Accelerator(mixed_precision='bf16')"),
}


def losses(done: CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_its_own_losses_on_ours(name, tmp_path):
    libraries, text, used = PROGRAMS[name]
    for library in libraries.split():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    script = tmp_path / "train.py"
    script.write_text(text)
    taken = run_unedited(script.name, environment={}, folder=tmp_path, frameworks=True)
    bare = losses(run_program(script, folder=tmp_path, frameworks=True))
    assert bare[-1] < bare[0]
    assert losses(taken) == pytest.approx(bare, rel=2e-3)
    assert f"train.py used {used}" in taken.stderr
