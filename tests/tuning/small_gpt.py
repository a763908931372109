"""A small GPT whose Linear layers fit every format, and the batches for rehearsing it."""

import torch
from torch import nn

WORDS, LENGTH = 128, 64


class Block(nn.Module):
    """Attention with one head, and an MLP: four Linear layers, or three without an output projection."""

    def __init__(self, width: int, *, projects: bool = True) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width) if projects else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        query, key, value = self.qkv(self.first_norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.squeeze(1))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class GPT(nn.Module):
    """A language model with four Linear layers per block, and a head if ``with_head``."""

    def __init__(self, blocks: int, *, width: int = 128, with_head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False) if with_head else None

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x @ self.words.weight.t() if self.head is None else self.head(x)


def workload(model, *, batch=2, count=1):
    """Return a training step and its batches."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(WORDS, (batch, LENGTH), generator=generator) for _ in range(count)]

    def step(words):
        logits = model(words)[:, :-1]
        nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1)).backward()

    return step, batches
