"""Hugging Face's Trainer after install(), with its usual options: bf16 has the stock bits, fp16 learns as
fp32.
"""

import importlib.util
import json

import pytest
import torch

from amp_plugin import AmpAccelerator, AmpKwargs
from amp_plugin.adapters.accelerate import install
from tests.adapters.accelerate_pair import reset
from tests.adapters.commands import launch
from tests.adapters.tiny_bert import bert, texts, with_lora
from tests.commands import amp
from tests.warm_processes import ROOT

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.checkpoint"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
REENTRANT = "reentrant checkpointing"  # only our kernels recompute it with the casts of its region
needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")


def tiny_bert():
    return bert(layers=1, dropout=0.1)


def train(folder, make=tiny_bert, resume=None, **arguments):
    """Train a classifier: is the first token in the upper half? Return the trainer and its log."""
    examples = texts(48)
    defaults = {"gradient_accumulation_steps": 2, "save_strategy": "no", "num_train_epochs": 2}
    defaults |= {"use_cpu": True, "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, learning_rate=5e-3, **{**defaults, **arguments}
    )
    trainer = transformers.Trainer(make(), settings, train_dataset=examples, eval_dataset=examples[:16])
    trainer.train(resume_from_checkpoint=resume)
    seen = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return trainer, [
        {key: line[key] for key in seen if key in line} for line in trainer.state.log_history[:-1]
    ]


HABITS = {
    "accumulation and clipping": {"num_train_epochs": 8},
    "gradient checkpointing": {"gradient_checkpointing": True},
    REENTRANT: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "the best model": {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "lora": {"make": with_lora},
}


def options_of(habit):
    if habit == "lora" and not importlib.util.find_spec("peft"):
        pytest.skip("needs peft")
    return dict(HABITS[habit])


@pytest.mark.parametrize(
    "habit",
    [pytest.param(habit, marks=[pytest.mark.native] if habit == REENTRANT else []) for habit in HABITS],
)
def test_in_bf16_it_trains_as_under_accelerates_own(habit, tmp_path):
    _, expected = train(tmp_path / "stock", bf16=True, **options_of(habit))
    reset()
    install(AmpKwargs(one_pass=False))  # use torch's own steps, to compare bits
    trainer, history = train(tmp_path / "ours", bf16=True, **options_of(habit))
    assert type(trainer.accelerator) is AmpAccelerator
    assert json.dumps(history) == json.dumps(expected)
    assert len(history) > 5


@pytest.mark.parametrize(
    "habit", ["accumulation and clipping", "gradient checkpointing", "label smoothing", "lora"]
)
def test_in_fp16_it_learns_as_in_fp32(habit, tmp_path):
    _, expected = train(tmp_path / "fp32", **options_of(habit))
    reset()
    install(AmpKwargs(init_scale=2.0**12))
    trainer, history = train(tmp_path / "fp16", fp16=True, **options_of(habit))
    assert trainer.accelerator.amp_metrics() == {"loss_scale": 2.0**12, "skipped_steps": 0}
    for mine, theirs in zip(history, expected, strict=True):
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], rel=0.2, abs=0.05), (name, mine, theirs)
    assert history[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.02)


# the first steps are skipped, so schedulers warn that they wait
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_skipped_steps_hold_the_learning_rate_and_end_a_run(tmp_path):
    install(AmpKwargs(init_scale=2.0**40, max_skips_in_a_row=4))
    trainer, history = train(tmp_path, fp16=True, max_steps=3, lr_scheduler_type="linear")
    assert trainer.accelerator.amp_metrics() == {"loss_scale": 2.0**37, "skipped_steps": 3}
    assert {line["learning_rate"] for line in history} == {5e-3}
    reset()
    with pytest.raises(RuntimeError, match=r"4 steps of \w+ in a row were skipped"):
        train(tmp_path, fp16=True)


@pytest.mark.parametrize("make", [tiny_bert, pytest.param(with_lora, marks=needs_peft)])
def test_it_resumes_with_its_loss_scale(make, tmp_path):
    install(AmpKwargs(init_scale=2.0**8, growth_interval=2))
    arguments = {"make": make, "fp16": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, history = train(tmp_path, **arguments)
    resumed, rest = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **arguments)
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert json.dumps(rest) == json.dumps(history)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    trained = [name for name, param in resumed.model.named_parameters() if param.requires_grad]
    assert trained
    assert make is tiny_bert or all("lora" in name or "classifier" in name for name in trained)


@pytest.mark.filterwarnings("ignore:.*are float32 now:UserWarning")
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_model_that_comes_in_bfloat16_moves_wholly_and_resumes_all_bits(weights, tmp_path):
    """transformers loads a checkpoint before it prepares the model.

    The checkpoint must not be rounded then.
    """

    install(AmpKwargs(weights=weights))
    arguments = {
        "make": lambda: bert(layers=1).bfloat16(),
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole, _ = train(tmp_path, **arguments)
    for name, before in bert(layers=1).bfloat16().state_dict().items():
        if "intermediate.dense.weight" in name:
            assert (whole.model.state_dict()[name] != before).all()
    assert whole.model.classifier.weight.dtype is (torch.bfloat16 if weights == "bf16" else torch.float32)
    resumed, _ = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **arguments)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


# -- programs that are not edited -----------------------------------------------------------------

PROGRAM = """
import tempfile
import transformers
from tests.adapters.tiny_bert import bert, texts, with_lora
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=8, learning_rate=5e-3, num_train_epochs=3, bf16=True, use_cpu=True,
    report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no")
trainer = transformers.Trainer({make}, arguments, train_dataset=texts(32))
trainer.train()
print(*(line["loss"] for line in trainer.state.log_history if "loss" in line))
"""


def losses_in(output):
    return [float(word) for word in output.splitlines()[-1].split()]


@pytest.mark.parametrize("make", ["bert(layers=1)", pytest.param("with_lora()", marks=needs_peft)])
def test_a_program_has_its_own_losses_under_amp_plugin_run(make, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(make=make))
    taken = amp("run", script)
    reset()
    exec(script.read_text(), {})
    assert losses_in(taken.stdout) == pytest.approx(losses_in(capsys.readouterr().out), rel=2e-3)
    used = "Accelerator(mixed_precision='bf16'); 12 optimizer steps, none skipped\n"
    assert taken.stderr.endswith(used)


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_program_learns_under_accelerate_launch(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(PROGRAM.format(make="bert(layers=1)").replace("bf16=True", "fp16=True"))
    config = ROOT / "configs" / "accelerate" / "cpu_fp16.yaml"
    words = ["--config_file", str(config), "-m", "amp_plugin", "run", str(script)]
    done = launch(words, {"PYTHONPATH": str(ROOT), "AMP_PLUGIN_INIT_SCALE": "512"})
    assert done.returncode == 0, done.stderr
    first, *_, last = losses_in(done.stdout)
    assert last < 0.9 * first
    assert "trainer.py used Accelerator(mixed_precision='fp16')" in done.stderr
