"""The models that the benchmarks train, and the parameter shapes of larger models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.setting import Setting

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTSize:
    """The size of a GPT and of its micro-batches."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    words: int = 128


class Block(nn.Module):
    """A transformer block with causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, with the shape (batch, length, width) of ``x``."""
        heads = self.qkv(self.norm_a(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_f(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose ``forward`` returns the loss."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from the tokens before it.

        The tokens are int64 of shape (batch, length).
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def batches(self, count: int, device: str) -> list[Tensor]:
        """Return ``count`` micro-batches."""
        shape = (count, self.size.batch, self.size.length)
        return list(torch.randint(self.size.words, shape).to(device))


class ResidualBlock(nn.Module):
    """A residual block of two 3x3 convolutions with batch norm, as in ResNet-18 (arXiv 1512.03385)."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, as (batch, channels, height, width)."""
        return functional.relu(self.body(x) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A ResNet for small images whose ``forward`` returns the loss."""

    def __init__(self, *, width: int, pixels: int, batch: int) -> None:
        super().__init__()
        self.pixels, self.batch = pixels, batch
        stages = (width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width)
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        before = (width, *stages[:-1])
        self.blocks = nn.Sequential(
            *(ResidualBlock(a, b) for a, b in zip(before, stages, strict=True)),
        )
        self.head = nn.Linear(stages[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss for images (batch, 3, pixels, pixels). The label of image i is i modulo 10."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        labels = torch.arange(len(images), device=images.device) % 10
        return functional.cross_entropy(self.head(features).float(), labels)

    def batches(self, count: int, device: str) -> list[Tensor]:
        """Return ``count`` micro-batches."""
        return list(torch.randn(count, self.batch, 3, self.pixels, self.pixels).to(device))


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions, as in ResNet-50 (arXiv 1512.03385)."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * inner, 1, bias=False),
            nn.BatchNorm2d(4 * inner),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != 4 * inner:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, as (batch, channels, height, width)."""
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """A ResNet-50 whose ``forward`` returns the loss. Width 64 gives the shapes of ``resnet50_shapes``."""

    def __init__(self, *, width: int, pixels: int, batch: int) -> None:
        super().__init__()
        self.pixels, self.batch = pixels, batch
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, before = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for block in range(count):
                stride = 2 if stage and block == 0 else 1
                blocks.append(Bottleneck(before, width * 2**stage, stride))
                before = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss for images (batch, 3, pixels, pixels). The label of an image is its index."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        labels = torch.arange(len(images), device=images.device) % 1000
        return functional.cross_entropy(self.head(features).float(), labels)

    def batches(self, count: int, device: str) -> list[Tensor]:
        """Return ``count`` batches of images in the memory format channels_last."""
        images = torch.randn(count, self.batch, 3, self.pixels, self.pixels)
        return [batch.to(device, memory_format=torch.channels_last) for batch in images]


def launch_bound_size(setting: Setting, layers: int = 6) -> GPTSize:
    """Return the size of a GPT so narrow that launching its ops takes longer than computing them."""
    batch, length = (2, 16) if setting.device == "cpu" else (4, 64)
    return GPTSize(layers=layers, width=64, heads=4, batch=batch, length=length)


def launch_bound_gpt(setting: Setting, layers: int = 6) -> GPT:
    """Make a launch-bound GPT on the device that ``setting`` names."""
    torch.manual_seed(0)
    return GPT(launch_bound_size(setting, setting.sized(layers, min(layers, 2)))).to(setting.device)


def compute_bound_gpt(setting: Setting) -> GPT:
    """Make a GPT large enough that arithmetic takes most of the time."""
    size = GPTSize(layers=4, width=256, heads=8, batch=2, length=128, words=1024)
    if setting.device == "cuda":
        size = GPTSize(layers=12, width=768, heads=12, batch=8, length=512, words=8192)
    torch.manual_seed(0)
    return GPT(setting.sized(size, launch_bound_size(setting, 1))).to(setting.device)


def residual_net(setting: Setting) -> ResidualNet:
    """Make a ResNet-18 for 32 x 32 pixels. On the CPU the ResNet has a quarter of the usual width."""
    width, batch = (16, 16) if setting.device == "cpu" else (64, 256)
    torch.manual_seed(0)
    return ResidualNet(
        width=setting.sized(width, 4), pixels=setting.sized(32, 8), batch=setting.sized(batch, 2)
    ).to(setting.device)


def resnet50_shapes() -> Shapes:
    """Return the shapes of ResNet-50's 161 parameters, with 25.6 million elements in total."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(blocks):
            convolutions = [(inner, before, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            if block == 0:
                convolutions.append((4 * inner, before, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            before = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_shapes(d: int = 768, blocks: int = 12) -> Shapes:
    """Return the shapes of GPT-2's parameters. The default is GPT-2 small (124M, 148 tensors)."""
    attention: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    feed_forward: Shapes = [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *[*attention, *feed_forward] * blocks, (d,), (d,)]
