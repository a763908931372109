"""Handwritten digits: the data, their order, and a small convolutional classifier.

Shared by every program that trains on the digits, so that two of them with the same
seed see the same batches and start from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
TRAINING_IMAGES = 1257  # of the 1797


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsLoaders:
    """The 1797 8x8 images of scikit-learn, split 70/10/20, each class in proportion.

    Batches are ``(images, labels)``: fp32 ``[B, 1, 8, 8]`` in ``[0, 1]`` and int64 ``[B]``.
    """

    train: DataLoader[tuple[Tensor, ...]]
    validation: DataLoader[tuple[Tensor, ...]]
    test: DataLoader[tuple[Tensor, ...]]


def digits_loaders(
    *, batch_size: int, seed: int, shift: bool = True, drop_last: bool = False
) -> DigitsLoaders:
    """Load the digits; the order of the training batches depends on ``seed`` alone.

    Args:
        batch_size: images a batch; the last batch of an epoch may be smaller.
        seed: seed of the split and of the shuffling.
        shift: move each training image by up to one pixel.
        drop_last: leave out an epoch's last training batch if it is smaller.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(16).unsqueeze_(1)
    labels = torch.from_numpy(digits.target).long()
    rest, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    train, validation = train_test_split(rest, test_size=0.125, random_state=seed, stratify=labels[rest])

    def subset(index: list[int]) -> TensorDataset:
        return TensorDataset(images[index], labels[index])

    order = torch.Generator().manual_seed(seed)
    collate = ShiftImages(seed=seed) if shift else None
    return DigitsLoaders(
        train=DataLoader(
            subset(train),
            batch_size=batch_size,
            shuffle=True,
            generator=order,
            collate_fn=collate,
            drop_last=drop_last,
        ),
        validation=DataLoader(subset(validation), batch_size=256),
        test=DataLoader(subset(test), batch_size=256),
    )


def digits_batches(
    loaders: DigitsLoaders, *, steps: int, device: str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield that many training batches, epoch after epoch.

    Args:
        loaders: the data.
        steps: batches in all.
        device: where images and labels go.
    """
    epochs = chain.from_iterable(repeat(loaders.train))
    for images, labels in islice(epochs, steps):
        yield images.to(device), labels.to(device)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    *,
    region: AbstractContextManager[object] | None = None,
    device: str = "cpu",
) -> float:
    """Return the share of right answers, in [0, 1].

    Args:
        model: returns logits, ``[B, 10]``, of images ``[B, 1, 8, 8]``.
        loader: the images and labels.
        region: the autocast region to run the model in, one that may be entered again.
        device: where the model is.
    """
    right = []
    for images, labels in loader:
        with region or nullcontext():
            right.append(model(images.to(device)).argmax(dim=1) == labels.to(device))
    return float(torch.cat(right).double().mean())


class ShiftImages:
    """Collate a batch, each image moved by up to one pixel in both directions.

    Args:
        seed: seed of the moves.
    """

    def __init__(self, *, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the images, ``[B, 1, 8, 8]``, moved, and their labels, ``[B]``."""
        images, labels = (torch.stack(column) for column in zip(*examples, strict=True))
        size = images.shape[-1]
        top, left = torch.randint(0, 3, (2, len(images), 1), generator=self.generator)
        rows, columns = top + torch.arange(size), left + torch.arange(size)
        batch = torch.arange(len(images))[:, None, None]
        moved = nn.functional.pad(images, (1, 1, 1, 1))[batch, 0, rows[:, :, None], columns[:, None, :]]
        return moved.unsqueeze(1), labels


class DigitsNet(nn.Module):
    """Classify 8x8 images: three convolutions, global mean, one linear layer.

    Args:
        width: channels of the first convolution; the later ones have twice as many.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(2 * width * 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, ``[B, 10]``, of fp32 images ``[B, 1, 8, 8]``."""
        return self.classifier(self.features(images))
