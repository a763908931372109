"""Train a generator and a critic with a gradient penalty (WGAN-GP) on images of digits.

    python -m recipes run wgan_gp [precision=bf16] [key=value ...]

Two optimizers that step at different times share one GradScaler. ``scaler.register`` tells the scaler about
both optimizers, so that ``scaler.update`` waits while either optimizer still has scaled gradients. The
generator's backward pass is called with ``inputs=``, so that no gradients are left in the critic. The method
is from "Improved Training of Wasserstein GANs" (Gulrajani and others, 2017). Generator and critic also get
the class of the digit as an input.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track

from amp_plugin import GradScaler, autocast
from amp_plugin.scaling import gradient_penalty
from recipes.shared import (
    Critic,
    Generator,
    LossScaleConfig,
    RecipeConfig,
    TrainingRecord,
    average_of,
    between,
    digits_batches,
    digits_loaders,
    draw_samples,
    number,
)

DISTANCE = "from real to made (L2 norm)"


@dataclass
class Config(RecipeConfig):
    """The config of this recipe. ``steps`` is the number of optimizer steps of the generator."""

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 2e-3
    loss_scale: LossScaleConfig = field(default_factory=lambda: LossScaleConfig(growth_interval=200))
    critic_steps: int = number(2, least=1)
    penalty: float = number(1.0, least=0)
    latent: int = number(16, least=1)
    width: int = number(192, least=1)


def train(config: Config) -> TrainingRecord:
    """Train both models and generate ten images of each digit. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = new_record("WGAN-GP", config)
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, shift=False)
    generator = Generator(config.latent, config.width).to(config.device)
    critic = Critic(config.width).to(config.device)
    both = [
        torch.optim.Adam(net.parameters(), config.learning_rate, betas=(0.5, 0.9), fused=True)
        for net in (generator, critic)
    ]
    generator_optimizer, critic_optimizer = both
    average = average_of(generator)
    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)
    scaler.register(*both)

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps * config.critic_steps, device=config.device)
    for _ in track(range(config.steps), "training"):
        for _ in range(config.critic_steps):
            images, labels = next(batches)
            real = images.flatten(1)
            with region:
                made = generator(labels).detach()
                distance = critic(real, labels).mean() - critic(made, labels).mean()
                mixed = between(real, made)
                scores = critic(mixed, labels)
            penalty = gradient_penalty(scores, mixed, scaler=scaler, kind="wgan-gp")
            critic_loss = config.penalty * penalty - distance
            scaler.scale(critic_loss).backward()
            scaler.step(critic_optimizer)
            scaler.update()
            critic_optimizer.zero_grad()
        with region:
            loss = -critic(generator(labels), labels).mean()
        scaler.scale(loss).backward(inputs=list(generator.parameters()))
        scaler.step(generator_optimizer)
        scaler.update()
        generator_optimizer.zero_grad()
        average.update_parameters(generator)
        record.add_scaled_step(critic_loss, scaler, generator_optimizer)
        record.add_to_curve(DISTANCE, distance)
    record.seconds = time.perf_counter() - start
    draw_samples(average, region, loaders, record)
    return record


def new_record(title: str, config: Config) -> TrainingRecord:
    """Return an empty TrainingRecord with the title and labels of this recipe."""
    return TrainingRecord(
        title=f"{title}, {config.precision.value}", loss_label="critic's loss (L2 norm)", log_loss=False
    )


if __name__ == "__main__":
    train(Config()).show(Path("runs/wgan_gp"))
