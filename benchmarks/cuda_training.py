"""A GPT training step on a GPU: our autocast and scaler beside torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amp_plugin
from amp_plugin.casting.cast_cache import CastCache
from benchmarks.cuda_timing import side_by_side

VOCABULARY = 8192


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same shape."""
        batch, length, width = x.shape
        heads = (
            self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to logits [batch, length, vocabulary]."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


MODELS = {  # layers, width, heads, batch, length
    "launch-bound (6 x 64)": (6, 64, 4, 4, 64),
    "compute-bound (12 x 768)": (12, 768, 12, 8, 512),
}


def trainer(shape: tuple[int, int, int, int, int], micro_batches: int, ours: bool):
    """Return a function that trains one optimizer step in fp16, clipping included."""
    layers, width, heads, batch, length = shape
    torch.manual_seed(0)
    model = GPT(layers, width, heads).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = (amp_plugin.GradScaler if ours else torch.amp.GradScaler)("cuda")
    cache = CastCache() if ours and micro_batches > 1 else None
    tokens = torch.randint(VOCABULARY, (micro_batches, batch, length + 1), device="cuda")

    def region():
        return amp_plugin.autocast("cuda", torch.float16, cache=cache) if ours else torch.autocast("cuda")

    def step() -> None:
        for micro_batch in tokens:
            with region():
                logits = model(micro_batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten())
            scaler.scale(loss / micro_batches).backward()
        if ours:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def training_step(name: str, micro_batches: int) -> dict[str, str]:
    """Milliseconds per optimizer step of both."""
    calls = {
        label: trainer(MODELS[name], micro_batches, label == "amp_plugin")
        for label in ("torch", "amp_plugin")
    }
    times = side_by_side({label: (lambda: None, call) for label, call in calls.items()}, rounds=9)
    return {
        "model": name,
        "k": str(micro_batches),
        "torch.amp ms": f"{times['torch']:.2f}",
        "amp_plugin ms": f"{times['amp_plugin']:.2f}",
        "speed-up": f"{times['torch'] / times['amp_plugin']:.2f}x",
    }
