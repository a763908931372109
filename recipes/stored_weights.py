"""Fine-tune a 16-bit transformer at a learning rate of 1e-5, once for each way to store its weights.

    python -m recipes run stored_weights [precision=fp16] [key=value ...]

transformers loads a checkpoint in the dtype in which it was saved. If a bfloat16 model is trained under
torch's own autocast, most of its weights never change. For most weights, an update of 1e-5 is less than half
the distance to the next bfloat16 number, so the update is rounded away. With ``store_weights`` no update is
lost to rounding. The initial model, the data and the optimizer are the same for each way to store weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from amp_plugin import GradScaler, autocast, store_weights
from amp_plugin.weights.store import in_fp32
from recipes.shared import ConfigError, Precision, RecipeConfig, Share, TrainingRecord, number

AS_LOADED = "as loaded"
WAYS = {  # the plots of the loss and the loss scale show the last run
    Precision.bf16: (AS_LOADED, "fp32", "bf16-stochastic", "bf16"),
    Precision.fp16: ("fp32", "fp16"),  # AS_LOADED would have fp16 gradients, which GradScaler refuses
    Precision.fp32: (AS_LOADED, "fp32"),
}
MOVED = "weights moved"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    precision: Precision = Precision.bf16
    steps: int = 150
    batch_size: int = 8
    learning_rate: float = 1e-5
    context: int = number(32, least=1)
    width: int = number(64, least=1)
    heads: int = number(4, least=1)
    layers: int = number(2, least=1)


def train(config: Config) -> TrainingRecord:
    """Fine-tune the same model once for each way to store its weights. Return the record of the run.

    Args:
        config: A config that was checked.

    Raises:
        ConfigError: The width is not a multiple of the number of heads, or the text is shorter than the
            model's context.
    """
    if config.width % config.heads:
        msg = f"width={config.width} is not allowed; it must be a multiple of heads={config.heads}"
        raise ConfigError(msg)
    text = "".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")
    if config.context >= len(text):
        msg = f"context={config.context} is not allowed; the text has {len(text):,} characters"
        raise ConfigError(msg)
    config.start()
    disable_progress_bar()
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    record = TrainingRecord(title=f"stored weights, {config.precision.value}", log_loss=False)
    ways = WAYS[config.precision]
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        _save_in_16_bits(config, folder)
        for way in ways:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(config.device).train()
            _fine_tune(model, way, codes, config, record, is_last=way == ways[-1])
    record.seconds = time.perf_counter() - start
    return record


def _save_in_16_bits(config: Config, folder: str) -> None:
    """Save a small GPT-2 with random weights in 16 bits, like most checkpoints on model hubs."""
    gpt = GPT2Config(
        vocab_size=128,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    dtype = torch.float16 if config.precision is Precision.fp16 else torch.bfloat16
    GPT2LMHeadModel(gpt).to(dtype).save_pretrained(folder)


def _fine_tune(
    model: PreTrainedModel, way: str, codes: Tensor, config: Config, record: TrainingRecord, *, is_last: bool
) -> None:
    is_ours, mixed = way != AS_LOADED, {"dtype": config.precision.dtype, "enabled": config.precision.mixed}
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.0)
    if is_ours:
        store_weights(model, optimizer, weights=way)  # type: ignore[arg-type]
    region = (autocast if is_ours else torch.autocast)(config.device, **mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    def weights() -> Tensor:
        with in_fp32(model):
            return torch.cat([param.detach().float().flatten() for param in model.parameters()])

    first, losses, moved = weights(), [], []
    for windows in track(_windows(codes, config), f"weights: {way}", total=config.steps):
        optimizer.zero_grad()
        with region:
            logits = model(input_ids=windows).logits[:, :-1].float()
            loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        moved.append(100 * (weights() != first).float().mean().item())
        if is_last:
            record.add_scaled_step(loss, scaler, optimizer)
    record.compare("loss of each way (nats)", way, losses)
    record.compare("weights moved (%)", way, moved)
    record.results[f"{MOVED}, {way}"] = Share(moved[-1] / 100)
    last = losses[-20:]
    record.results[f"loss, {way}"] = sum(last) / len(last)


def _windows(codes: Tensor, config: Config) -> Iterator[Tensor]:
    """Yield the batches, int64 ``[B, context]``.

    The same batches are used for each way to store the weights.
    """
    draws = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(codes) - config.context, (config.batch_size, 1), generator=draws)
        yield codes[starts + torch.arange(config.context)].to(config.device)


if __name__ == "__main__":
    train(Config()).show(Path("runs/stored_weights"))
