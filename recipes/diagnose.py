"""Find an op that overflows in fp16 with ``diagnose``, and add an op rule that runs it in fp32.

    python -m recipes run diagnose [precision=bf16] [key=value ...]

The attention layer scales its scores after the matrix product instead of scaling the queries before the
product. In fp16 the matrix product overflows to inf, and the loss becomes nan. One training step under
``diagnose`` names the op that overflowed, its module and its line of code. ``finding.rule_names`` lists the
ops that must run in fp32 to avoid the overflow.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import amp_plugin
from amp_plugin import GradScaler, OpRules, autocast
from recipes.shared import (
    CLASSES,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
)

SIZE = 150.0  # multiplies queries and keys, so that their dot products overflow in fp16
ROWS = 8  # rows of an image; each row is a token


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    steps: int = 400
    width: int = number(32, least=1)
    cure: bool = True


class Attention(nn.Module):
    """Attention that scales its scores only after the matrix product, which is too late for fp16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output for ``x``. Both have shape ``[B, tokens, width]``."""
        scores = (SIZE * self.query(x)) @ (SIZE * self.key(x)).transpose(-1, -2)
        return (scores / SIZE**2 / x.shape[-1] ** 0.5).softmax(-1) @ self.value(x)


class Classifier(nn.Module):
    """Classifies a digit; each row of pixels is a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(ROWS, width), nn.Parameter(torch.randn(ROWS, width))
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.name = nn.Sequential(nn.Linear(ROWS * width, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of ``images [B, 1, 8, 8]``."""
        tokens = self.norm(self.embed(images.squeeze(1)) + self.place)
        return self.name((tokens + self.attention(tokens)).flatten(1))


def rules_for(model: nn.Module, images: Tensor, labels: Tensor, config: Config) -> tuple[OpRules, str]:
    """Run one step under diagnose, and return op rules that avoid the overflow it finds.

    The second result names the overflowing op and its module, or is "none" if no op overflows.
    """
    rules = OpRules.default(config.device.partition(":")[0])
    with amp_plugin.diagnose(model, keep_going=True) as diagnosis, region_of(config, rules):
        cross_entropy(model(images), labels).backward()
    model.zero_grad()
    if not diagnosis.findings:
        return rules, "none"
    finding = diagnosis.findings[0]
    print(finding)
    for op in finding.rule_names:
        rules = rules.with_rule(op, "fp32")
    return rules, f"{finding.op} in {finding.module}"


def region_of(config: Config, rules: OpRules) -> AbstractContextManager[object]:
    """Return an autocast region with the given op rules, in the precision that the config names."""
    device, precision = config.device.partition(":")[0], config.precision
    return autocast(device, precision.dtype, enabled=precision.mixed, rules=rules)


def train(config: Config) -> TrainingRecord:
    """Find an overflow and avoid it with op rules, then train a classifier. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"diagnose, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = Classifier(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    images, labels = (tensor.to(config.device) for tensor in next(iter(loaders.train)))
    rules, overflows = rules_for(model, images, labels, config)
    if not config.cure:
        rules = OpRules.default(rules.device_type)
    region = region_of(config, rules)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    record.results["op that overflows"] = overflows
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/diagnose"))
