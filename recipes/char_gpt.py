"""Train a character GPT on Python's manual, with accumulation, clipping, and optional compilation.

    python -m recipes run char_gpt [compile=true] [precision=bf16] [key=value ...]

The training text is what ``help()`` shows about Python's keywords and types. It has 465,000 characters. The
text comes from ``pydoc_data.topics``, which is part of every Python installation. Each optimizer step
accumulates the gradients of several micro-batches. Clipping uses the norm of the accumulated gradients.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy

from amp_plugin import GradScaler, OpRules, autocast
from recipes.shared import CharGPT, ConfigError, RecipeConfig, TrainingRecord, number


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    steps: int = 600
    batch_size: int = 4
    learning_rate: float = 6e-3
    micro_batches: int = number(2, least=1)
    max_norm: float = number(1.0, above=0)
    context: int = number(48, least=1)
    width: int = number(48, least=1)
    heads: int = number(4, least=1)
    layers: int = number(2, least=1)
    compile: bool = False
    rules: str = ""


def train(config: Config) -> TrainingRecord:
    """Train on 90 % of the text, validate on the other 10 %, and generate text. Return the record of the run.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: The width is not a multiple of the number of heads, or the text is shorter than the
            model's context.
    """
    if config.width % config.heads:
        msg = f"width={config.width} is not allowed; it must be a multiple of heads={config.heads}"
        raise ConfigError(msg)
    config.start()
    record = TrainingRecord(title=f"character GPT, {config.precision.value}", log_loss=False)
    text = "".join(topics[key] for key in sorted(topics))
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(character) for character in text], device=config.device)
    training, held_out = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
    if config.context >= len(held_out):
        msg = f"context={config.context} is not allowed; the text held out has {len(held_out):,} characters"
        raise ConfigError(msg)
    net = CharGPT(len(characters), config).to(config.device)
    model = torch.compile(net) if config.compile else net
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate, betas=(0.9, 0.95), fused=True)

    rules = OpRules.from_yaml(config.rules) if config.rules else None
    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed, rules=rules)
    measuring = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    def loss_on(source: Tensor, starts: Tensor, region: torch.autocast = region) -> Tensor:
        windows = source[starts[:, None] + torch.arange(config.context + 1, device=source.device)]
        with region:
            logits = model(windows[:, :-1])
            return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    start = time.perf_counter()
    for _ in track(range(config.steps), "training"):
        optimizer.zero_grad()
        mean = torch.zeros((), device=config.device)
        for _ in range(config.micro_batches):
            starts = torch.randint(len(training) - config.context, (config.batch_size,)).to(config.device)
            loss = loss_on(training, starts) / config.micro_batches
            scaler.scale(loss).backward()
            mean += loss.detach()
        scaler.clip_grad_norm_(optimizer, config.max_norm)
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(mean, scaler, optimizer)
    record.seconds = time.perf_counter() - start
    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - config.context - 1, 64, device=config.device).long()
        loss = loss_on(held_out, starts, measuring).item()
        record.results["bits per character, held out"] = loss / math.log(2)
        record.results["it writes"] = "".join(characters[code] for code in write(net, codes[:20], region))
    return record


def write(net: CharGPT, text: Tensor, region: torch.autocast, length: int = 100) -> list[int]:
    """Return ``length`` characters that the model generates after ``text``, as integer codes."""
    for _ in range(length):
        with region:
            logits = net(text[None, -net.context :])[0, -1].float()
        text = torch.cat([text, torch.multinomial((logits / 0.8).softmax(0), 1)])
    return text[-length:].tolist()


if __name__ == "__main__":
    train(Config()).show(Path("runs/char_gpt"))
