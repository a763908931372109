"""WGAN-GP: a generator and a critic with a gradient penalty learn to write digits.

    python -m recipes run wgan_gp [--config configs/wgan_gp/bf16.yaml] [key=value ...]

Two optimizers that step at different times share one scaler. ``register`` makes both known, so that
``update`` waits while one of them still holds scaled gradients. The generator's backward pass names its
inputs: without that it would leave gradients in the critic. Gulrajani et al. 2017, conditional on the digit.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from rich.progress import track
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn.functional import one_hot

from amp_plugin import GradScaler, autocast
from amp_plugin.scaling import gradient_penalty
from recipes.catalogue import run
from recipes.digits import CLASSES, digits_batches, digits_loaders
from recipes.settings import RecipeConfig
from recipes.training_record import TrainingRecord


@dataclass
class Config(RecipeConfig):
    """What a config of this recipe may set; a step is one of the generator."""

    steps: int = 600
    batch_size: int = 128
    learning_rate: float = 1e-3
    critic_steps: int = 2
    penalty: float = 1.0
    latent: int = 16
    width: int = 128


class Conditioned(nn.Module):
    """Three linear layers over a vector ``[B, inputs]`` and a label ``[B]``."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs + CLASSES, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return ``[B, outputs]``."""
        return self.layers(torch.cat([vectors, 4.0 * one_hot(labels, CLASSES)], dim=1))


def train(config: Config) -> TrainingRecord:
    """Train the two, draw ten samples of each digit, and return what happened.

    Args:
        config: a checked config.
    """
    config.start()
    record = TrainingRecord(
        title=f"WGAN-GP, {config.precision.value}", loss_label="critic's loss (pixels)", log_loss=False
    )
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, shift=False)
    generator = Conditioned(config.latent, config.width, 64).to(config.device)
    critic = Conditioned(64, config.width, 1).to(config.device)
    both = [
        torch.optim.Adam(net.parameters(), config.learning_rate, betas=(0.5, 0.9), fused=True)
        for net in (generator, critic)
    ]
    generator_optimizer, critic_optimizer = both
    average = torch.optim.swa_utils.AveragedModel(
        generator, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    region = autocast(config.device, config.precision.dtype, enabled=config.precision.mixed)
    scaler = GradScaler(config.device, **asdict(config.loss_scale), enabled=config.precision.scaled)
    scaler.register(*both)

    def fake(labels: Tensor) -> Tensor:
        noise = torch.randn(len(labels), config.latent, device=config.device)
        with region:
            return generator(noise, labels).float().sigmoid()

    start = time.perf_counter()
    batches = digits_batches(loaders, steps=config.steps * config.critic_steps, device=config.device)
    for _ in track(range(config.steps), "training"):
        for _ in range(config.critic_steps):
            images, labels = next(batches)
            real, made = images.flatten(1), fake(labels).detach()
            mix = torch.rand(len(labels), 1, device=config.device)
            between = (mix * real + (1 - mix) * made).requires_grad_()
            with region:
                distance = critic(real, labels).float().mean() - critic(made, labels).float().mean()
                scores = critic(between, labels)
            penalty = gradient_penalty(scores, between, scaler=scaler, kind="wgan-gp")
            critic_loss = config.penalty * penalty - distance
            scaler.scale(critic_loss).backward()
            scaler.step(critic_optimizer)
            scaler.update()
            critic_optimizer.zero_grad()
        made = fake(labels)
        with region:
            loss = -critic(made, labels).float().mean()
        scaler.scale(loss).backward(inputs=list(generator.parameters()))
        scaler.step(generator_optimizer)
        scaler.update()
        generator_optimizer.zero_grad()
        average.update_parameters(generator)
        record.add_scaled_step(critic_loss, scaler, *both)
        record.add_to_curve("distance of real and made (pixels)", distance)
    record.seconds = time.perf_counter() - start
    generator.load_state_dict(average.module.state_dict())
    asked = torch.arange(CLASSES, device=config.device).repeat(CLASSES)
    with torch.no_grad():
        samples = fake(asked).cpu()
    record.pictures["samples"] = samples.view(CLASSES, CLASSES, 8, 8)
    images, labels = next(iter(loaders.test))
    read = KNeighborsClassifier(5).fit(images.flatten(1).numpy(), labels.numpy()).predict(samples.numpy())
    record.results["samples read as the digit asked for"] = float((read == asked.cpu().numpy()).mean())
    return record


if __name__ == "__main__":
    run("wgan_gp")
