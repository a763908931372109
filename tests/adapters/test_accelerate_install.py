from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import Accelerator

from amp_plugin.adapters.accelerate import AmpAccelerator, AmpKwargs, install, uninstall
from tests.adapters.accelerate_pair import GradientKeeper, Weights, last_gradient, reset
from tests.adapters.commands import launch
from tests.adapters.tiny_bert import bert, texts

ROOT = Path(__file__).resolve().parents[2]
TRAINER_SCRIPT = """
import sys
import torch
import transformers

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)
model = transformers.BertForSequenceClassification(config)
words = torch.randint(2, 64, (64, 8))
examples = [{"input_ids": line, "labels": (line[0] > 32).long()} for line in words]
arguments = transformers.TrainingArguments(
    sys.argv[1], per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=5e-3,
    num_train_epochs=10, fp16=True, report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no",
)
trainer = transformers.Trainer(model, arguments, train_dataset=examples)
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


def test_accelerators_made_elsewhere_are_ours():
    install()
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    assert type(accelerator) is AmpAccelerator
    assert accelerator.scaler.get_scale() == 65536.0


def test_a_subclass_keeps_its_methods_and_gets_ours():
    install()
    accelerator = Verbose(mixed_precision="fp16", cpu=True, note="a")
    assert isinstance(accelerator, Verbose)
    assert isinstance(accelerator, AmpAccelerator)
    model = Weights()
    model, optimizer = accelerator.prepare(model, GradientKeeper(model.parameters()))
    accelerator.backward(model(3.0))
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert accelerator.note == "ab"
    assert last_gradient(optimizer) == 3.0
    again = Verbose(mixed_precision="fp16", cpu=True)
    assert type(again) is type(accelerator)


def test_options_hold_where_the_program_has_none():
    install(AmpKwargs(init_scale=2.0))
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler.get_scale() == 2.0
    own = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[AmpKwargs(init_scale=4.0)])
    assert own.scaler.get_scale() == 4.0
    install(AmpKwargs(init_scale=8.0))
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler.get_scale() == 8.0


def test_uninstall_leaves_accelerate_as_it_was():
    original = Accelerator.__init__
    install()
    uninstall()
    uninstall()
    assert Accelerator.__init__ is original
    assert type(Accelerator(mixed_precision="fp16", cpu=True)) is Accelerator
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler is None


def test_ours_works_while_installed():
    install()
    assert AmpAccelerator(mixed_precision="fp16", cpu=True).scaler is not None


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
@pytest.mark.parametrize(
    "launcher", [["amp_plugin", "run"], ["amp_plugin.adapters.accelerate"]], ids="_".join
)
def test_transformers_trainer_under_accelerate_launch(launcher, tmp_path):
    """An unedited script whose Trainer makes its own Accelerator."""
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER_SCRIPT)
    words = [
        *("--config_file", str(ROOT / "configs" / "accelerate" / "cpu_fp16.yaml")),
        *("-m", *launcher, str(path), str(tmp_path)),
    ]
    done = launch(words, {"PYTHONPATH": str(ROOT), "AMP_PLUGIN_INIT_SCALE": "512"})
    assert done.returncode == 0, done.stderr
    kind, precision, dtype, scale, learnt = done.stdout.splitlines()[-1].split()
    assert (kind, precision, dtype, scale) == ("AmpAccelerator", "fp16", "torch.float16", "512.0")
    assert learnt == "True"


class TestTransformersTrainer:
    """A tiny Bert, made from a config, trained by Hugging Face's Trainer."""

    @staticmethod
    def train(folder, resume=False, **arguments):
        transformers = pytest.importorskip("transformers")
        model, examples = bert(layers=2), texts(64)
        settings = transformers.TrainingArguments(
            str(folder),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            num_train_epochs=10,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            **{"max_grad_norm": 1.0, "save_strategy": "no", **arguments},
        )
        trainer = transformers.Trainer(model, settings, train_dataset=examples)
        dtypes = []
        model.classifier.register_forward_hook(lambda *call: dtypes.append(call[-1].dtype))
        trainer.train(resume_from_checkpoint=resume)
        return trainer, [line for line in trainer.state.log_history if "loss" in line], dtypes

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
    def test_it_learns_with_accumulation_and_clipping(self, precision, dtype, tmp_path):
        _, reference, _ = self.train(tmp_path)  # fp32
        reset()
        install()
        trainer, history, dtypes = self.train(tmp_path, **{precision: True})
        assert type(trainer.accelerator) is AmpAccelerator
        assert set(dtypes) == {dtype}
        assert history[-1]["loss"] < 0.1 < history[0]["loss"]
        assert max(abs(a["loss"] - b["loss"]) for a, b in zip(history, reference, strict=True)) < 0.05
        assert history[0]["grad_norm"] == pytest.approx(reference[0]["grad_norm"], rel=0.02)
        if precision == "fp16":
            assert trainer.accelerator.amp_metrics() == {"loss_scale": 65536.0, "skipped_steps": 0}

    @pytest.mark.filterwarnings("ignore::UserWarning")  # the first steps skip: schedulers that wait
    def test_its_accelerator_tells_of_scale_and_skips(self, tmp_path):
        install(AmpKwargs(init_scale=2.0**40, max_skips_in_a_row=0))
        trainer, _, _ = self.train(tmp_path, fp16=True, max_steps=3, max_grad_norm=0.0)
        assert trainer.accelerator.amp_metrics() == {"loss_scale": 2.0**37, "skipped_steps": 3}

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_run_that_only_skips_ends(self, tmp_path):
        install(AmpKwargs(init_scale=2.0**60, max_skips_in_a_row=4))
        with pytest.raises(RuntimeError, match="4 optimizer steps in a row were skipped"):
            self.train(tmp_path, fp16=True)

    def test_stock_fp16_on_the_cpu_is_fp32(self, tmp_path):
        trainer, _, dtypes = self.train(tmp_path, fp16=True, max_steps=1)
        assert trainer.accelerator.scaler is None
        assert set(dtypes) == {torch.float32}

    def test_a_skipped_step_holds_the_learning_rate_back(self, tmp_path):
        install(AmpKwargs(init_scale=2.0**40))
        trainer, history, _ = self.train(tmp_path, fp16=True, max_steps=3, lr_scheduler_type="linear")
        assert trainer.accelerator.amp_metrics()["skipped_steps"] == 3.0
        assert {line["learning_rate"] for line in history} == {5e-3}

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_run_resumes_with_its_loss_scale(self, tmp_path):
        install(AmpKwargs(init_scale=2.0**10, growth_interval=2))
        arguments = {"fp16": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        whole, history, _ = self.train(tmp_path, **arguments)
        resumed, rest, _ = self.train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **arguments)
        assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
        assert resumed.accelerator.scaler.get_scale() == 2.0**12
        assert [line["loss"] for line in rest] == [line["loss"] for line in history]
