"""One small transformers model of each kind, made from configs."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WIDTH, LAYERS, HEADS, WORDS = 64, 2, 4, 1024  # 16 words per feature of a token; BERT has 40, T5-small 63
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}

Made = tuple[nn.Module, list[dict[str, Any]]]


def _texts(batch: int = 8, length: int = 64) -> list[torch.Tensor]:
    return [torch.randint(3, WORDS, (batch, length)) for _ in range(2)]


def encoder() -> Made:
    """BERT that predicts masked words."""
    config = transformers.BertConfig(vocab_size=WORDS, **SIZES, **NO_DROPOUT)
    return transformers.BertForMaskedLM(config), [{"input_ids": ids, "labels": ids} for ids in _texts()]


def decoder() -> Made:
    """Llama that predicts the next word."""
    sizes = {**SIZES, "intermediate_size": 3 * WIDTH}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=HEADS, **sizes)
    return transformers.LlamaForCausalLM(config), [{"input_ids": ids, "labels": ids} for ids in _texts()]


def encoder_decoder() -> Made:
    """T5 that writes a text backwards."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    batches = [{"input_ids": ids, "labels": ids.flip(1)} for ids in _texts()]
    return transformers.T5ForConditionalGeneration(config), batches


def vision() -> Made:
    """ViT that classifies images."""
    config = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, **SIZES, **NO_DROPOUT)
    batches = [
        {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))} for _ in range(2)
    ]
    return transformers.ViTForImageClassification(config), batches


def speech() -> Made:
    """wav2vec 2.0 that classifies sounds."""
    config = transformers.Wav2Vec2Config(
        **SIZES,
        conv_dim=(64, 64, 64),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=5,
        classifier_proj_size=32,
    )
    batches = [{"input_values": torch.randn(4, 4000), "labels": torch.randint(5, (4,))} for _ in range(2)]
    return transformers.Wav2Vec2ForSequenceClassification(config), batches


def state_space() -> Made:
    """Mamba that predicts the next word."""
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8
    )
    batches = [{"input_ids": ids, "labels": ids} for ids in _texts(batch=4, length=32)]
    return transformers.MambaForCausalLM(config), batches


MODELS: dict[str, Callable[[], Made]] = {
    "encoder": encoder,
    "decoder": decoder,
    "encoder-decoder": encoder_decoder,
    "vision": vision,
    "speech": speech,
    "state-space": state_space,
}
