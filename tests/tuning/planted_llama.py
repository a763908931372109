"""transformers' Llama with roundings planted into it, one at a time, for the time of a block."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama import modeling_llama as llama

from amp_plugin.patches import replaced

LOW = torch.bfloat16


def rounded(x: Tensor) -> Tensor:
    """Round a tensor to bf16, and keep its dtype."""
    return x.to(LOW).to(x.dtype)


# -- what stands in for functions of transformers and torch --------------------------------------


def norm_casts_before_the_weight(norm: nn.Module, x: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return rounded(norm.weight * rounded(normed))


def norm_epsilon_in_bf16(norm: nn.Module, x: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True).to(LOW)
    return norm.weight * (x * torch.rsqrt((variance + norm.variance_epsilon).float()))


def rope_in_bf16(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (rounded(table.float().unsqueeze(unsqueeze_dim)) for table in (cos, sin))
    return tuple(rounded(rounded(x * cos) + rounded(llama.rotate_half(x) * sin)) for x in (q, k))


def residual_in_bf16(layer: nn.Module, hidden_states: Tensor, **more: Any) -> Tensor:
    x = rounded(hidden_states)
    x = rounded(x + layer.self_attn(hidden_states=layer.input_layernorm(x), **more)[0])
    return rounded(x + layer.mlp(layer.post_attention_layernorm(x)))


def softmax_in_bf16(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, scale: float, **more: Any
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    operand = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        scores = q.to(operand).float() @ k.to(operand).float().mT * scale
        reads = torch.ones(scores.shape[-2:], dtype=torch.bool)
        reads = reads.tril() if more.get("is_causal") else reads
        reads = reads if attn_mask is None else reads & attn_mask
        weights = scores.to(LOW).masked_fill(~reads, torch.finfo(LOW).min).softmax(-1)
        return (weights.float() @ v.to(operand).float()).to(operand)


def scale_after_the_cast(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention that casts the query first, and then multiplies it by the scale."""

    def scaled(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float, **more: Any) -> Tensor:
        cast = q.to(torch.get_autocast_dtype("cpu")).float()
        return attention((cast * scale).to(LOW), k, v, *args, scale=1.0, **more)

    return scaled


PLANTED = {
    "norm casts before the weight": (llama.LlamaRMSNorm, "forward", norm_casts_before_the_weight),
    "norm epsilon in bf16": (llama.LlamaRMSNorm, "forward", norm_epsilon_in_bf16),
    "rope in bf16": (llama, "apply_rotary_pos_emb", rope_in_bf16),
    "residual in bf16": (llama.LlamaDecoderLayer, "forward", residual_in_bf16),
    "softmax in bf16": (functional, "scaled_dot_product_attention", softmax_in_bf16),
    "scale after the cast": (
        functional,
        "scaled_dot_product_attention",
        scale_after_the_cast(functional.scaled_dot_product_attention),
    ),
}


@contextmanager
def planted(cause: str) -> Iterator[None]:
    """Plant a rounding; none if ``cause`` is not one of ``PLANTED``."""
    with ExitStack() as stack:
        if cause in PLANTED:
            stack.enter_context(replaced(*PLANTED[cause]))
        yield
