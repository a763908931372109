"""Find and fix the gap between a generator with an fp8 key-value cache and its trainer, which has no cache.

``python -m recipes.trainer_and_generator FOLDER`` samples from a small Llama with transformers' cache, writes
``rollouts.jsonl``, and compares the log-probabilities of the generator with those of the trainer. The recipe
then switches the cache from fp8 to bf16, as ``tune`` recommends, and compares the log-probabilities again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_plugin import Gap, Rollout, autocast, tune

WORDS, PROMPTS, LENGTH = 64, 16, 24


def policy() -> Any:
    """Return a small Llama with random weights. Every call returns the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- of an extra

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.15,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()


def cache(*, in_fp8: bool) -> Any:
    """Return a key-value cache that rounds keys and values to fp8 or to bf16."""
    from transformers import DynamicCache  # noqa: PLC0415 -- of an extra

    class Cache(DynamicCache):  # type: ignore[misc] # untyped
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            kept = [part.bfloat16() for part in (keys, values)]
            if in_fp8:
                kept = [part.to(torch.float8_e4m3fn).bfloat16() for part in kept]
            return super().update(*kept, *args, **kwargs)

    return Cache()


@torch.no_grad()
def record(generator: Any, file: Path, *, in_fp8: bool) -> None:
    """Sample sequences from a generator in bf16, and write them to a rollout file."""
    torch.manual_seed(1)
    prompts = torch.randint(1, WORDS, (PROMPTS, 4))
    with autocast("cpu", torch.bfloat16):
        made = generator.generate(
            prompts,
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH,
            past_key_values=cache(in_fp8=in_fp8),
            output_logits=True,
            return_dict_in_generate=True,
        )
    sampled = made.sequences[:, prompts.shape[1] :]
    every = torch.stack(made.logits, 1).float().log_softmax(-1)
    recorded = every.gather(-1, sampled[..., None])[..., 0]
    Rollout.of(prompts.tolist(), sampled.tolist(), recorded.tolist()).save(file)


def main(folder: str, tell: Callable[[str], Any] = print) -> tuple[float, float]:
    """Compare a trainer with two generators. Return the mean gap to each."""
    model, file = policy(), Path(folder) / "rollouts.jsonl"

    def step(tokens: Tensor) -> Any:
        with autocast("cpu", torch.bfloat16):
            return model(tokens, use_cache=False)

    gaps = []
    for in_fp8 in (True, False):
        record(model, file, in_fp8=in_fp8)
        found = tune(step, goal=Gap(file), model=model)
        tell(f"keys and values in {'fp8' if in_fp8 else 'bf16'}\n{found}\n")
        gaps.append(found.gap.mean)
    return gaps[0], gaps[1]


if __name__ == "__main__":
    main(sys.argv[1])
