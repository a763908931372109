"""Losses of models of four kinds with ``weights="bf16"``: those of stock bf16 autocast, but for exact ties."""

import pytest
import torch

from amp_plugin import autocast, store_weights
from amp_plugin.weights.store import in_fp32
from tests.weights.twins import assert_same, away_from_ties

transformers = pytest.importorskip("transformers")
STEPS = 20


def text(vocabulary):
    tokens = torch.randint(0, vocabulary, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def images(count=4):
    pixels = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "labels": torch.arange(count) % 2}


def bert():
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), text(99)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=99,
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), text(99)


def vit():
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), images()


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config), images(32)


@torch.no_grad()
def nudge(model):
    """Move one weight of each matrix by the last place of bfloat16: what a tie does."""
    for param in model.parameters():
        if param.dim() > 1:
            param.view(-1)[0] *= 1 + 2.0**-8


def furthest(ours, stock):
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, stock, strict=True))


def losses(make, region, weights, *, nudged=False, ties=True):
    """Return the losses, what is trained, and how many weights are stored; ``ties=False``: without ties at each step."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    away_from_ties(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stored = 0 if weights is None else len(store_weights(model, optimizer, weights=weights))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with region("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if nudged and not found:
            nudge(model)
        if not ties:
            with in_fp32(model):
                away_from_ties(model)
        found.append(loss.item())
    return found, model, stored


MODELS = pytest.mark.parametrize("make", [bert, gpt2, vit, resnet])


@MODELS
def test_the_first_loss_is_autocasts_and_20_go_apart_as_by_ties(make):
    stock, _, _ = losses(make, torch.autocast, None)
    nudged, _, _ = losses(make, torch.autocast, None, nudged=True)
    ours, _, stored = losses(make, autocast, "bf16")
    assert stored >= 4
    assert ours[0] == stock[0]
    print(make.__name__, f"ours {furthest(ours, stock):.1e} nudged {furthest(nudged, stock):.1e}")
    assert furthest(ours, stock) < max(1e-4, 2 * furthest(nudged, stock))


@MODELS
def test_but_for_exact_ties_20_steps_are_stocks_to_the_bit(make):
    """Nothing but ties makes losses go apart: moved off them after each step, both runs are one."""
    stock, reference, _ = losses(make, torch.autocast, None, ties=False)
    for region in (torch.autocast, autocast):
        ours, model, stored = losses(make, region, "bf16", ties=False)
        assert stored >= 4
        assert ours == stock
        assert_same(reference, model)
