"""A generator and a critic of digits, and samples of what the generator has learnt.

Shared by the forms of the WGAN-GP recipe, so that all of them start from the same weights.
"""

from __future__ import annotations

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recipes.digits import CLASSES, DigitsLoaders
from recipes.training_record import Share, TrainingRecord

PIXELS = 64


class Conditioned(nn.Module):
    """Three linear layers over a vector ``[B, inputs]`` and a label ``[B]``."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.layers = nn.Sequential(
            nn.Linear(inputs + CLASSES, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Return ``[B, outputs]``, fp32."""
        return self.layers(torch.cat([vectors, 4.0 * one_hot(labels, CLASSES)], dim=1)).float()


class Critic(Conditioned):
    """Score images given as vectors ``[B, 64]``: high for real ones; returns ``[B, 1]``."""

    def __init__(self, width: int) -> None:
        super().__init__(PIXELS, width, 1)


class Generator(Conditioned):
    """Draw the digits that ``labels [B]`` name, from noise."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__(latent, width, PIXELS)

    def forward(self, labels: Tensor) -> Tensor:  # type: ignore[override]
        """Return images as vectors, fp32 ``[B, 64]`` in ``[0, 1]``."""
        noise = torch.randn(len(labels), self.inputs, device=labels.device)
        return super().forward(noise, labels).sigmoid()


def between(real: Tensor, made: Tensor) -> Tensor:
    """Return a random point between each two images; the points require grad."""
    mix = torch.rand(len(real), 1, device=real.device)
    return (mix * real + (1 - mix) * made).requires_grad_()


def average_of(generator: Generator) -> AveragedModel:
    """Return a running mean of the weights, which draws better than the latest ones."""
    return AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))


def draw_samples(
    generator: nn.Module, region: torch.autocast, loaders: DigitsLoaders, record: TrainingRecord
) -> None:
    """Draw ten samples of each digit; count those that a nearest-neighbour classifier reads as asked."""
    asked = torch.arange(CLASSES).repeat(CLASSES)
    with torch.no_grad(), region:
        samples = generator(asked.to(next(generator.parameters()).device)).cpu()
    record.pictures["samples"] = samples.view(CLASSES, CLASSES, 8, 8)
    images, labels = next(iter(loaders.test))
    read = KNeighborsClassifier(5).fit(images.flatten(1).numpy(), labels.numpy()).predict(samples.numpy())
    record.results["samples read as the digit asked for"] = Share((read == asked.numpy()).mean())
