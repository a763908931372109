"""With ``weights="bf16"``, losses of four kinds of models equal those of bf16 autocast, except for exact
ties.

65 537 float32 numbers round to an even bfloat16 number, but 16 more bits can distinguish only 65 536. So no
pair of 16-bit numbers can hold all bits and also round ties as autocast does. Pairs round ties away from
zero.
"""

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


TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


MODELS = {
    "BertForMaskedLM": ({"vocab_size": 99, **TINY, **NO_DROPOUT}, text(99)),
    "GPT2LMHeadModel": (
        {"vocab_size": 99, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        text(99),
    ),
    "ViTForImageClassification": ({"image_size": 32, "patch_size": 8, **TINY, **NO_DROPOUT}, images()),
    "ResNetForImageClassification": (
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        images(32),
    ),
}


def furthest(ours, stock):
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, stock, strict=True))


def losses(name, region, weights, *, ties=True):
    """Return the losses and the model.

    With ``ties=False``, a float32 weight that is exactly halfway between two 16-bit numbers is changed in its
    last bit after each step.
    """
    torch.manual_seed(0)
    kind, (config, batch) = getattr(transformers, name), MODELS[name]
    model = kind(kind.config_class(**config)).train()
    away_from_ties(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    assert len(store_weights(model, optimizer, weights=weights)) >= (4 if weights == "bf16" else 0)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with region("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if not ties:
            with in_fp32(model):
                away_from_ties(model)
        found.append(loss.item())
    return found, model


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_autocasts_but_for_what_the_last_place_of_ties_does_to_autocast(name):
    """Without ties, both runs have the same bits.

    With ties, pairs differ from autocast as much as an autocast run without ties does.
    """
    stock, _ = losses(name, torch.autocast, "fp32")
    moved, reference = losses(name, torch.autocast, "fp32", ties=False)
    for region in (torch.autocast, autocast):
        ours, model = losses(name, region, "bf16", ties=False)
        assert ours == moved
        assert_same(reference, model)
    ours, _ = losses(name, autocast, "bf16")
    assert ours[0] == stock[0]
    far = furthest(ours, stock), furthest(moved, stock), furthest(ours, moved)
    print(name, "ours {:.1e}, autocast off ties {:.1e}, from each other {:.1e}".format(*far))
    assert far[0] <= (2 * far[1] if "Image" in name else 1e-4)
    assert far[2] <= max(far[1], 1e-6)
