"""A second Llama, as inference engines write it: fused qkv, a cache, one sequence at a time, explicit casts.

It samples tokens, and it scores tokens that were sampled before. ``planted`` names a rounding that the
trainer does not have.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from amp_plugin import Rollout
from amp_plugin.tuning.log_probs import Sampling

PLANTED = (
    "norm casts before the weight",
    "norm epsilon in bf16",
    "rope in bf16",
    "head in bf16",
    "softmax in bf16",
    "residual in bf16",
    "scale after the cast",
    "cache in fp8",
    "top-p",
    "temperature",
)


class Engine:
    """Computes matrix products in ``low``, and everything else, including the head, in float32."""

    def __init__(self, model: nn.Module, planted: str = "", low: torch.dtype = torch.bfloat16) -> None:
        self.planted, self.low = planted, low
        self.config, state = model.config, model.state_dict()
        self.weights = {name: value.detach().float() for name, value in state.items()}
        for layer in range(self.config.num_hidden_layers):
            self._fuse(f"model.layers.{layer}.self_attn", ("q_proj", "k_proj", "v_proj"), "qkv")
            self._fuse(f"model.layers.{layer}.mlp", ("gate_proj", "up_proj"), "gate_up")
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.width = self.config.hidden_size // self.heads

    def _fuse(self, module: str, parts: tuple[str, ...], name: str) -> None:
        self.weights[f"{module}.{name}"] = torch.cat(
            [self.weights.pop(f"{module}.{part}.weight") for part in parts]
        )

    def rounded(self, x: Tensor, cause: str) -> Tensor:
        """Round to bf16 if this cause is planted."""
        return x.to(torch.bfloat16).float() if self.planted == cause else x

    def product(self, x: Tensor, name: str) -> Tensor:
        return linear(x.to(self.low), self.weights[name].to(self.low)).float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = self.config.rms_norm_eps
        variance = x.pow(2).mean(-1, keepdim=True)
        if self.planted == "norm epsilon in bf16":
            added = (variance.to(torch.bfloat16) + epsilon).float()
        else:
            added = variance + epsilon
        normed = self.rounded(x * torch.rsqrt(added), "norm casts before the weight")
        return self.rounded(self.weights[f"{name}.weight"] * normed, "norm casts before the weight")

    def rope(self, x: Tensor, begin: int) -> Tensor:
        places = torch.arange(begin, begin + x.shape[-2]).float()
        base = self.config.rope_parameters["rope_theta"]
        angles = places[:, None] / base ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.cat([angles, angles], -1)
        cos, sin = (self.rounded(table, "rope in bf16") for table in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return self.rounded(
            self.rounded(x * cos, "rope in bf16") + self.rounded(turned * sin, "rope in bf16"), "rope in bf16"
        )

    def attention(self, x: Tensor, name: str, cache: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        begin = cache[name][0].shape[-2] if name in cache else 0
        sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).transpose(-3, -2)
            for part in self.product(x, f"{name}.qkv").split(sizes, -1)
        )
        q, k = self.rope(q, begin).to(self.low), self.rope(k, begin).to(self.low)
        v = v.to(self.low)
        if self.planted == "cache in fp8":
            k, v = (tensor.to(torch.float8_e4m3fn).to(self.low) for tensor in (k, v))
        if begin:
            k, v = (torch.cat(pair, -2) for pair in zip(cache[name], (k, v), strict=True))
        cache[name] = k, v
        k, v = (tensor.repeat_interleave(self.heads // self.kv_heads, -3) for tensor in (k, v))
        reads = torch.arange(k.shape[-2]) <= torch.arange(begin, begin + q.shape[-2])[:, None]
        return self.product(self.mixed(q, k, v, reads).transpose(-3, -2).flatten(-2), f"{name}.o_proj.weight")

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, reads: Tensor) -> Tensor:
        scale = 1 / math.sqrt(self.width)
        if self.planted == "scale after the cast":
            scores = (q.float() * scale).to(torch.bfloat16).float() @ k.float().mT
        else:
            scores = q.float() @ k.float().mT * scale
        if self.planted == "softmax in bf16":
            weights = scores.to(torch.bfloat16).masked_fill(~reads, -math.inf).softmax(-1)
            return (weights.float() @ v.float()).to(self.low)
        scores = scores.masked_fill(~reads, -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights.to(self.low).float() @ v.float() / weights.sum(-1, keepdim=True)).to(self.low)

    def logits(self, tokens: Tensor, cache: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return the logits for the next tokens of one sequence, of shape (tokens, vocabulary)."""
        x = self.rounded(self.weights["model.embed_tokens.weight"][tokens], "residual in bf16")
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            mixed = self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", cache)
            x = self.rounded(x + mixed, "residual in bf16")
            inner = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = self.product(inner, f"{name}.mlp.gate_up").to(self.low).chunk(2, -1)
            x = self.rounded(
                x + self.product(silu(gate) * up, f"{name}.mlp.down_proj.weight"), "residual in bf16"
            )
        x = self.norm(x, "model.norm")
        if self.planted == "head in bf16":
            return linear(x.bfloat16(), self.weights["lm_head.weight"].bfloat16()).float()
        return linear(x, self.weights["lm_head.weight"])

    @torch.no_grad()
    def rollout(
        self,
        prompts: list[list[int]],
        sampled: list[list[int]] | None = None,
        *,
        length: int = 24,
        seed: int = 0,
    ) -> Rollout:
        """Sample tokens after prompts, or score given ones, token by token. Record log-probabilities."""
        recorded_as = {"temperature": Sampling(temperature=0.7), "top-p": Sampling(top_p=0.9)}
        sampling, draws = recorded_as.get(self.planted, Sampling()), torch.Generator().manual_seed(seed)
        tokens: list[list[int]] = []
        values: list[list[float]] = []
        for number, prompt in enumerate(prompts):
            cache: dict[str, tuple[Tensor, Tensor]] = {}
            tokens.append([])
            values.append([])
            logits = self.logits(torch.tensor(prompt), cache)[-1:]
            for place in range(length):
                given = sampled[number][place] if sampled else None
                drawn = _drawn(logits[0], sampling, draws) if given is None else given
                values[-1].append(float(sampling.log_probs(logits, torch.tensor([drawn]))))
                tokens[-1].append(drawn)
                logits = self.logits(torch.tensor([drawn]), cache)
        settings = {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p)}
        return Rollout.of(prompts, tokens, values, **settings)


def _drawn(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    probabilities, order = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True)
    kept = torch.where(probabilities.cumsum(-1) - probabilities < sampling.top_p, probabilities, 0.0)
    return int(order[torch.multinomial(kept, 1, generator=draws)])
