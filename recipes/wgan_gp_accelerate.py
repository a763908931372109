"""Train a WGAN-GP with Accelerate, with two optimizers, a gradient penalty and one loss scale.

    python -m recipes run wgan_gp_accelerate [precision=bf16] [key=value ...]

This is the Accelerate version of ``wgan_gp.py``. AmpAccelerator computes the gradient penalty, and accepts
``inputs=`` in the generator's backward pass. Models prepared by the accelerator need no ``with autocast``,
because every call runs in its own autocast region. The critic is called three times, in three separate
regions, so the gradients of the three calls are added in fp32. These gradients differ from the gradients in
``wgan_gp.py`` by rounding errors.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from torch.optim import Adam

from amp_plugin import AmpAccelerator, AmpKwargs
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


def new_record(title: str, config: Config) -> TrainingRecord:
    """Return an empty TrainingRecord with the title and labels of this recipe."""
    return TrainingRecord(
        title=f"{title}, {config.precision.value}", loss_label="critic's loss (L2 norm)", log_loss=False
    )


def train(config: Config) -> TrainingRecord:
    """Train both models and generate ten images of each digit. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = new_record("WGAN-GP with Accelerate", config)
    accelerator = AmpAccelerator(
        mixed_precision=config.precision.value if config.precision.mixed else "no",
        cpu=config.device == "cpu",
        kwargs_handlers=[AmpKwargs(**asdict(config.loss_scale))] if config.precision.scaled else [],
    )
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, shift=False)
    plain_generator, critic = Generator(config.latent, config.width), Critic(config.width)
    average = average_of(plain_generator).to(accelerator.device)
    generator, critic = accelerator.prepare(plain_generator, critic)
    both = [
        accelerator.prepare(Adam(net.parameters(), config.learning_rate, betas=(0.5, 0.9), fused=True))
        for net in (generator, critic)
    ]
    generator_optimizer, critic_optimizer = both

    start = time.perf_counter()
    batches = digits_batches(
        loaders, steps=config.steps * config.critic_steps, device=str(accelerator.device)
    )
    for _ in track(range(config.steps), "training"):
        for _ in range(config.critic_steps):
            images, labels = next(batches)
            real = images.flatten(1)
            made = generator(labels).detach()
            distance = critic(real, labels).mean() - critic(made, labels).mean()
            mixed = between(real, made)
            penalty = accelerator.gradient_penalty(critic(mixed, labels), mixed, kind="wgan-gp")
            critic_loss = config.penalty * penalty - distance
            accelerator.backward(critic_loss)
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        loss = -critic(generator(labels), labels).mean()
        accelerator.backward(loss, inputs=list(generator.parameters()))
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        average.update_parameters(plain_generator)
        record.add_scaled_step(critic_loss, accelerator.scaler, generator_optimizer.optimizer)
        record.add_to_curve(DISTANCE, distance)
    record.seconds = time.perf_counter() - start
    with torch.no_grad():
        draw_samples(average, accelerator.autocast(), loaders, record)
    accelerator.end_training()
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/wgan_gp_accelerate"))
