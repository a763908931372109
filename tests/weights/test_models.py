"""Losses of models of four kinds with ``weights="bf16"``: those of stock bf16 autocast, but for exact ties."""

import pytest
import torch

from amp_plugin import autocast, store_weights

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


def away_from_ties(param):
    """Move weights that lie half-way between two bfloat16 numbers: pairs round those away from zero, autocast to even."""
    bits = param.view(torch.int32)
    bits.add_((bits & 0xFFFF) == 0x8000)


@torch.no_grad()
def nudge(model):
    """Move one weight of each matrix by the last place of bfloat16: what a tie does."""
    for param in model.parameters():
        if param.dim() > 1:
            param.view(-1)[0] *= 1 + 2.0**-8


def furthest(ours, stock):
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, stock, strict=True))


def losses(make, region, weights, *, nudged=False):
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    with torch.no_grad():
        for param in model.parameters():
            away_from_ties(param)
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
        found.append(loss.item())
    return found, stored


@pytest.mark.parametrize("make", [bert, gpt2, vit, resnet])
def test_the_first_loss_is_autocasts_and_20_go_apart_as_by_ties(make):
    stock, _ = losses(make, torch.autocast, None)
    nudged, _ = losses(make, torch.autocast, None, nudged=True)
    for region in (torch.autocast, autocast):
        ours, stored = losses(make, region, "bf16")
        assert stored >= 4
        assert ours[0] == stock[0]
        print(make.__name__, f"ours {furthest(ours, stock):.1e} nudged {furthest(nudged, stock):.1e}")
        assert furthest(ours, stock) < max(1e-4, 2 * furthest(nudged, stock))
