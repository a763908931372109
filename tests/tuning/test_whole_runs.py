"""The effect of tuned rules on six kinds of models, and on complete training runs."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import amp_plugin

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.whole_run]


def config_of(name: str, *overrides: str):
    from recipes import catalogue
    from recipes.config import load_config

    return load_config(catalogue.load(name).Config, ROOT / f"configs/{name}.yaml", [*overrides])


def tuned(model, batches, goal="memory", **options):
    def step(batch):
        with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()

    return amp_plugin.tune(step, model=model, batches=batches, goal=goal, **options)


def test_four_of_six_kinds_of_models_save_bytes_at_no_more_error():
    from tests.tuning.models import MODELS  # imports transformers

    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batches = make()
        found[name] = tuned(model.train(), batches)
    better = []
    for name, tuning in found.items():
        before, after = tuning.before, tuning.after
        print(name, *map(str, tuning.changes or ["the default stays"]), tuning.to_yaml(), sep="\n")
        assert after.error <= 1.05 * before.error, name
        assert tuning.keeps_default == (after == before), name
        if after.saved_bytes <= 0.9 * before.saved_bytes or after.cast_bytes <= 0.8 * before.cast_bytes:
            better.append(name)
        else:
            assert tuning.keeps_default or after.saved_bytes < before.saved_bytes, name
    assert len(better) >= 4, better


def test_an_overflow_is_cured_and_training_equals_fp32(monkeypatch):
    """In the recipe `diagnose`, the attention overflows in fp16. Without a hint, tune finds the op."""
    from recipes import diagnose as overflowing
    from recipes.shared import digits_batches, digits_loaders

    config = config_of("diagnose")
    torch.manual_seed(config.seed)
    model = overflowing.Classifier(config.width)
    batches = list(digits_batches(digits_loaders(batch_size=64, seed=0), steps=3, device="cpu"))

    def step(batch):
        images, labels = batch
        with amp_plugin.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(model(images), labels)
        (1024 * loss).backward()

    found = amp_plugin.tune(step, model=model, batches=batches, goal="accuracy")
    assert found.before.failed == 3
    assert found.after.failed == 0
    assert 1 <= len(found.changes) <= 3
    monkeypatch.setattr(overflowing, "rules_for", lambda *_: (found.rules, "found by tune"))
    in_fp16 = overflowing.train(config).test_accuracy
    in_fp32 = overflowing.train(config_of("diagnose", "precision=fp32")).test_accuracy
    assert in_fp16 == pytest.approx(in_fp32, abs=0.025)


def test_a_gpt_trained_by_tuned_rules_ends_where_the_default_ends(tmp_path):
    from recipes import char_gpt

    config = config_of("char_gpt", "precision=bf16")
    texts = "".join(char_gpt.topics[key] for key in sorted(char_gpt.topics))
    characters = sorted(set(texts))
    codes = torch.tensor([characters.index(character) for character in texts[:20_000]])
    torch.manual_seed(0)
    model = char_gpt.CharGPT(len(characters), config)
    windows = [codes[torch.randint(len(codes) - 49, (16,))[:, None] + torch.arange(49)] for _ in range(4)]

    def step(window):
        with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()

    # no rules stay within a budget of 0.05
    found = amp_plugin.tune(step, model=model, batches=windows, budget=0.3)
    Console().print(found.headline, found.table())
    assert not found.keeps_default
    found.save(tmp_path / "rules.yaml")
    key = "bits per character, held out"
    default = char_gpt.train(config).results[key]
    with_rules = char_gpt.train(dataclasses.replace(config, rules=str(tmp_path / "rules.yaml"))).results[key]
    print(f"bits per character: {default:.4f} by the default rules, {with_rules:.4f} by the tuned ones")
    assert with_rules == pytest.approx(default, rel=0.005)
