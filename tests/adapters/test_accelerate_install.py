from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import Accelerator

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs, install, uninstall
from tests.adapters.accelerate_pair import last_gradient, prepared
from tests.adapters.commands import launch

ROOT = Path(__file__).resolve().parents[2]
TRAINER_SCRIPT = """
import sys
import transformers
from tests.adapters.tiny_bert import bert, texts

model = bert(layers=1)
arguments = transformers.TrainingArguments(
    sys.argv[1], per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=5e-3,
    num_train_epochs=10, fp16=True, report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no",
)
trainer = transformers.Trainer(model, arguments, train_dataset=texts(64))
dtypes = []
model.classifier.register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
ours = trainer.accelerator
print(type(ours).__name__, ours.mixed_precision, dtypes[0], ours.scaler.get_scale(), losses[-1] < 0.5 * losses[0])
"""


class Verbose(Accelerator):
    """A subclass as other libraries have them."""

    def __init__(self, *args, note="", **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note

    def backward(self, loss, **kwargs):
        self.note += "b"
        super().backward(loss, **kwargs)


def test_a_subclass_keeps_its_methods_and_gets_ours():
    install()
    accelerator = Verbose(mixed_precision="fp16", cpu=True, note="a")
    assert isinstance(accelerator, Verbose)
    assert isinstance(accelerator, AmpAccelerator)
    (model,), (optimizer,) = prepared(accelerator)
    accelerator.backward(model(3.0))
    for _ in range(2):
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert accelerator.note == "ab"
    assert last_gradient(optimizer) == 3.0
    again = Verbose(mixed_precision="fp16", cpu=True)
    assert type(again) is type(accelerator)


def test_options_hold_where_the_program_has_none():
    for scale in (2.0, 8.0):  # the last ones hold
        install(AmpKwargs(init_scale=scale))
        accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
        assert type(accelerator) is AmpAccelerator
        assert accelerator.scaler.get_scale() == scale
    own = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[AmpKwargs(init_scale=4.0)])
    assert own.scaler.get_scale() == 4.0


def test_uninstall_leaves_accelerate_as_it_was():
    original = Accelerator.__init__
    install()
    uninstall()
    uninstall()
    assert Accelerator.__init__ is original
    assert type(Accelerator(mixed_precision="fp16", cpu=True)) is Accelerator
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler is None


def test_install_after_an_accelerator_was_made_warns():
    AmpAccelerator(cpu=True)
    install()  # ours: nothing to tell
    uninstall()
    stock = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="no effect on the Accelerator that was made before"):
        install()
    assert type(stock) is Accelerator


@pytest.mark.native
def test_uninstall_gives_torch_autocast_back():
    from amp_plugin import OpRules

    install(AmpKwargs(rules=OpRules.default("cpu").with_rule("aten::matmul", "fp32")))
    Accelerator(mixed_precision="bf16", cpu=True)
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.float32
    uninstall()
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16


@pytest.mark.slow
def test_transformers_trainer_under_accelerate_launch(tmp_path):
    """An unedited script whose Trainer makes its own Accelerator; the older name does what `amp-plugin run` does."""
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER_SCRIPT)
    words = [
        *("--config_file", str(ROOT / "configs" / "accelerate" / "cpu_fp16.yaml")),
        *("-m", "amp_plugin.adapters.accelerate", str(path), str(tmp_path)),
    ]
    done = launch(words, {"PYTHONPATH": str(ROOT), "AMP_PLUGIN_INIT_SCALE": "512"})
    assert done.returncode == 0, done.stderr
    kind, precision, dtype, scale, learnt = done.stdout.splitlines()[-1].split()
    assert (kind, precision, dtype, scale) == ("AmpAccelerator", "fp16", "torch.float16", "512.0")
    assert learnt == "True"
