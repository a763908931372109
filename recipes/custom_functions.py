"""Use custom_fwd, custom_bwd and cast_inputs, so that custom autograd Functions work under autocast.

    python -m recipes run custom_functions [precision=bf16] [key=value ...]

``custom_fwd`` records the autocast state of the forward pass, and ``custom_bwd`` runs the backward pass in
that state. Without ``custom_fwd`` and ``custom_bwd``, a matrix product in ``backward`` runs in the dtype of
its arguments. ``cast_inputs`` casts the arguments to one dtype and turns autocast off while the Function
runs. If ``device_type`` is not given, ``custom_fwd`` and ``custom_bwd`` use the autocast state of the
arguments' device. The recipe shows Functions with and without ``setup_context``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from amp_plugin import GradScaler, autocast, custom_bwd, custom_fwd
from recipes.shared import (
    CLASSES,
    RecipeConfig,
    TrainingRecord,
    accuracy,
    digits_batches,
    digits_loaders,
    number,
)


@dataclass
class Config(RecipeConfig):
    """The config of this recipe, with its own keys and the keys that all recipes share."""

    steps: int = 800
    learning_rate: float = 1e-2
    width: int = number(64, least=1)


class LinearReLU(torch.autograd.Function):
    """``relu(x @ weight.T)``, computed in the dtype of the autocast region.

    For the backward pass, the Function saves its arguments and its output, but no other tensors.
    """

    @staticmethod
    @custom_fwd
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``[B, outputs]`` for ``x [B, inputs]`` and ``weight [outputs, inputs]``."""
        output = (x @ weight.T).relu_()
        ctx.save_for_backward(x, weight, output)
        return output

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``x`` and ``weight``."""
        x, weight, output = ctx.saved_tensors
        grad = grad * (output > 0)
        return (grad @ weight).to(x.dtype), (grad.T @ x).to(weight.dtype)


class LogSumExp(torch.autograd.Function):
    """``log(sum(exp(x)))`` in fp32. In fp16 ``exp`` could overflow, because max(x) is not subtracted."""

    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(x: Tensor) -> Tensor:
        """Return ``[B]`` for ``x [B, classes]``."""
        return x.exp().sum(dim=1).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save what the backward pass needs."""
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of ``x``."""
        x, output = ctx.saved_tensors
        return grad[:, None] * (x.float() - output[:, None]).exp()


class Classifier(nn.Module):
    """Two LinearReLU layers and a linear one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, inputs) * (2 / inputs) ** 0.5) for inputs in (64, width)
        )
        self.name = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of ``images [B, 1, 8, 8]``."""
        features = images.flatten(1)
        for weight in self.weights:
            features = LinearReLU.apply(features, weight)
        return self.name(features)


def train(config: Config) -> TrainingRecord:
    """Train a digits classifier and test it. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = TrainingRecord(title=f"custom functions, {config.precision.value}")
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed)
    model = Classifier(config.width).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, fused=True)

    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps, device=config.device)
    for images, labels in track(batches, "training", total=config.steps):
        optimizer.zero_grad()
        with region:
            logits = model(images)
            loss = (LogSumExp.apply(logits) - logits.gather(1, labels[:, None])[:, 0].float()).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.add_scaled_step(loss, scaler, optimizer)
    record.seconds = time.perf_counter() - start
    record.test_accuracy = accuracy(model, loaders.test, region=region, device=config.device)
    record.results["dtype of the logits"] = str(logits.dtype)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/custom_functions"))
