"""Train a WGAN-GP in a LightningModule with manual optimization, two optimizers and one loss scale.

    python -m recipes run wgan_gp_lightning [precision=bf16] [key=value ...]

This is the Lightning version of ``wgan_gp.py``. The Trainer's precision plugin computes the gradient penalty.
No other code deals with precision. ``toggle_optimizer`` prevents the generator's backward pass from leaving
gradients in the critic.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor
from torch.optim import Adam

from amp_plugin import AmpPrecision
from recipes.shared import (
    Critic,
    Generator,
    LossScaleConfig,
    RecipeConfig,
    TrainingRecord,
    average_of,
    between,
    digits_loaders,
    draw_samples,
    number,
    quiet_lightning,
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


class DigitsGAN(LightningModule):
    """A LightningModule with a generator, a running average of it, and a critic."""

    def __init__(self, config: Config, record: TrainingRecord) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config, self.record = config, record
        self.generator, self.critic = Generator(config.latent, config.width), Critic(config.width)
        self.average = average_of(self.generator)
        self.critic_steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Step the critic. After every ``critic_steps`` steps of the critic, step the generator."""
        images, labels = batch
        critic_loss, distance = self.critic_step(images.flatten(1), labels)
        self.critic_steps += 1
        if self.critic_steps % self.config.critic_steps:
            return
        optimizer, _ = self.optimizers()
        self.toggle_optimizer(optimizer)
        self.manual_backward(-self.critic(self.generator(labels), labels).mean())
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.average.update_parameters(self.generator)
        self.record.add_scaled_step(
            critic_loss, self.trainer.precision_plugin.scaler, self.trainer.optimizers[0]
        )
        self.record.add_to_curve(DISTANCE, distance)

    def critic_step(self, real: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Step the critic. Return the critic's loss and its estimate of the Wasserstein distance."""
        _, optimizer = self.optimizers()
        made = self.generator(labels).detach()
        distance = self.critic(real, labels).mean() - self.critic(made, labels).mean()
        mixed = between(real, made)
        scores = self.critic(mixed, labels)
        penalty = self.trainer.precision_plugin.gradient_penalty(scores, mixed, kind="wgan-gp")
        loss = self.config.penalty * penalty - distance
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss, distance

    def configure_optimizers(self) -> list[Adam]:
        """Return the optimizer of the generator and the optimizer of the critic."""
        rate = self.config.learning_rate
        return [
            Adam(net.parameters(), rate, betas=(0.5, 0.9), fused=True)
            for net in (self.generator, self.critic)
        ]


def train(config: Config) -> TrainingRecord:
    """Train both models and generate ten images of each digit. Return the record of the run.

    Args:
        config: A config that was checked.
    """
    config.start()
    record = new_record("WGAN-GP in Lightning", config)
    loaders = digits_loaders(batch_size=config.batch_size, seed=config.seed, shift=False)
    module = DigitsGAN(config, record)
    with quiet_lightning():
        trainer = Trainer(
            plugins=[AmpPrecision(config.precision.value, **asdict(config.loss_scale))],
            accelerator=config.device,
            devices=1,
            # Lightning's max_steps counts the steps of all optimizers.
            max_steps=config.steps * (config.critic_steps + 1),
            callbacks=[RichProgressBar()],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(module, loaders.train)
        record.seconds = time.perf_counter() - start
    region = trainer.precision_plugin.autocast_context_manager()
    draw_samples(module.average.to(config.device), region, loaders, record)
    return record


if __name__ == "__main__":
    train(Config()).show(Path("runs/wgan_gp_lightning"))
