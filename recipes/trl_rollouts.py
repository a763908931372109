"""Measure the gap between sampling and training with TRL's SFT, DPO and GRPO, in fp16 and bf16.

A policy samples tokens one by one with a key-value cache, but is trained on all tokens at once. Sampling and
training compute the same log-probabilities except for rounding. The difference between the log-probabilities
of sampling and training is called the gap. The gap is smaller in fp16 than in bf16, because fp16 has three
more mantissa bits. ``Gap(rollout).measure(step)`` measures the gap. The command ``amp-plugin gap`` also names
the cause of the gap.

``python -m recipes.trl_rollouts FOLDER`` runs each trainer, stops and resumes it half-way, and plots the gap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_plugin import AmpKwargs, Gap, Rollout, autocast
from amp_plugin.adapters.accelerate import install, uninstall

WORDS, STEPS = 60, 20
PRECISIONS = ("fp16", "bf16", "bf16-true")
KINDS = ("sft", "dpo", "grpo")


def tokenizer() -> Any:
    """Return a new tokenizer with a vocabulary of sixty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 -- of an extra
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106 -- a word
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


def policy() -> Any:
    """Return a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- of an extra

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 3,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def data(kind: str) -> Any:
    """Return a dataset with texts for SFT, prompts with two answers for DPO, or prompts for GRPO."""
    from datasets import Dataset  # noqa: PLC0415 -- of an extra

    prompts = [f"w{i % WORDS} w{(i + 1) % WORDS} w{(i + 2) % WORDS}" for i in range(64)]
    right = [" " + " ".join(f"w{(i + k) % WORDS}" for k in range(3, 9)) for i in range(64)]
    wrong = [" " + " ".join(f"w{(7 * i + 3 * k) % WORDS}" for k in range(3, 9)) for i in range(64)]
    if kind == "sft":
        return Dataset.from_dict({"text": [a + b for a, b in zip(prompts, right, strict=True)]})
    if kind == "dpo":
        return Dataset.from_dict({"prompt": prompts, "chosen": right, "rejected": wrong})
    return Dataset.from_dict({"prompt": prompts})


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Reward each completion with the fraction of its words that are even numbers, such as ``w4``."""
    words = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in line) / 8 for line in words]


def trainer_of(kind: str, precision: str, folder: Path) -> Any:
    """Return a TRL trainer with the usual arguments. ``install()`` makes the trainer use AmpAccelerator."""
    import trl  # noqa: PLC0415 -- of an extra

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "fp16": precision == "fp16",
        "bf16": precision != "fp16",
    }
    common: dict[str, Any] = {"model": policy(), "train_dataset": data(kind), "processing_class": tokenizer()}
    if kind == "sft":
        return trl.SFTTrainer(args=trl.SFTConfig(max_length=32, **options), **common)
    if kind == "dpo":
        return trl.DPOTrainer(ref_model=policy(), args=trl.DPOConfig(max_length=32, **options), **common)
    grpo = trl.GRPOConfig(num_generations=4, max_completion_length=8, beta=0.0, **options)
    return trl.GRPOTrainer(args=grpo, reward_funcs=even_words, **common)


def train(kind: str, precision: str, folder: Path, *, stop: int = STEPS, resume: bool = False) -> Any:
    """Train until step ``stop``. If ``resume`` is True, continue from a checkpoint. Return the trainer."""
    from transformers import TrainerCallback  # noqa: PLC0415 -- of an extra

    class Stop(TrainerCallback):  # type: ignore[misc] # untyped
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop |= state.global_step >= stop

    weights = "bf16-true" if precision == "bf16-true" else "fp32"
    install(AmpKwargs(init_scale=2.0**12, weights=weights))  # type: ignore[arg-type] # a str
    try:
        trainer = trainer_of(kind, precision, folder)
        trainer.add_callback(Stop())
        trainer.train(resume_from_checkpoint=resume or None)
    finally:
        uninstall()
    return trainer


def gap(model: Any, dtype: torch.dtype, *, weights_too: bool, samples: int = 64, length: int = 24) -> float:
    """Return the KL divergence between sampling and training for a policy that computes in ``dtype``.

    Args:
        model: The policy, in float32.
        dtype: The dtype in which it computes.
        weights_too: Cast the weights to ``dtype`` instead of using autocast.
        samples: The number of sequences to sample.
        length: The number of tokens in each sequence.
    """
    model = model.to(dtype) if weights_too else model
    torch.manual_seed(1)
    prompt = torch.randint(3, WORDS + 3, (samples, 3))

    def step(tokens: Tensor) -> Any:
        with autocast("cpu", dtype=dtype, enabled=not weights_too):
            return model(tokens)

    with torch.no_grad(), autocast("cpu", dtype=dtype, enabled=not weights_too):
        made = model.generate(
            prompt,
            do_sample=True,
            max_new_tokens=length,
            min_new_tokens=length,
            output_logits=True,
            return_dict_in_generate=True,
        )
    sampled = made.sequences[:, 3:]
    every = torch.stack(made.logits, 1).float().log_softmax(-1)
    recorded = every.gather(-1, sampled[..., None])[..., 0]
    rollout = Rollout.of(prompt.tolist(), sampled.tolist(), recorded.tolist())
    return Gap(rollout).measure(step).kl


def main(folder: str, tell: Callable[[str], Any] = print) -> dict[str, list[float]]:
    """Run each trainer in each precision. Plot and return KL divergences between sampling and training."""
    gaps: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for precision in PRECISIONS:
        for kind in KINDS:
            place = Path(folder) / f"{kind}-{precision}"
            train(kind, precision, place, stop=STEPS // 2)
            trainer = train(kind, precision, place, resume=True)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).float().eval()
            dtype = torch.float16 if precision == "fp16" else torch.bfloat16
            gaps[precision].append(gap(model, dtype, weights_too=precision == "bf16-true"))
            shown = "reward" if kind == "grpo" else "loss"
            seen = [line[shown] for line in trainer.state.log_history if shown in line]
            learnt = f"{shown} {seen[0]:.3f} -> {seen[-1]:.3f}"
            tell(f"{kind} in {precision}: {learnt}, KL {gaps[precision][-1]:.2e}")
    draw(gaps, Path(folder) / "gap.png")
    return gaps


def draw(gaps: dict[str, list[float]], path: Path) -> None:
    """Plot the KL divergence for each precision and each TRL trainer."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- of an extra

    axes = Figure(figsize=(6, 3.5), layout="constrained").subplots()
    for place, (precision, values) in enumerate(gaps.items()):
        axes.bar([i + 0.27 * (place - 1) for i in range(len(KINDS))], values, 0.25, label=precision)
    axes.set_yscale("log")
    axes.set_xticks(range(len(KINDS)), [kind.upper() for kind in KINDS])
    axes.set_ylabel("KL, rollout from training (nats per token)")
    axes.set_ylim(bottom=min(map(min, gaps.values())) / 4)  # a logarithmic axis cannot start at zero
    axes.figure.legend(title="computed in", loc="outside right upper")
    axes.figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
