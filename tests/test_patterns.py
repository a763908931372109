"""Patterns for modules have the same meaning in every option that takes them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from amp_plugin import DtypePlan, store_weights
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.patterns import found_patterns, matched_modules, require_matches


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def make_model():
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


def by_fp32_modules(model, patterns):
    return set(apply_fp32_modules(model, patterns))


def by_plan(model, patterns):
    in_fp32 = DtypePlan(compute="bf16", fp32_modules=patterns).in_fp32(model)
    return {name for name, module in model.named_modules() if module in in_fp32}


def by_weights(model, patterns):
    """Return those modules, of all that could be stored in 16 bits, whose weights stay in float32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store_weights(model, optimizer, weights="bf16-true", fp32_modules=patterns)
    return {
        name.rpartition(".")[0] for name, param in model.named_parameters() if param.dtype is torch.float32
    }


OPTIONS = [by_fp32_modules, by_plan, by_weights]
CASES = {
    "LayerNorm": {"0.norm", "1.norm"},
    "*.norm": {"0.norm", "1.norm"},
    "2": {"2"},
    "[01].linear": {"0.linear", "1.linear"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pattern", CASES)
def test_an_option_takes_the_modules_that_a_pattern_means(option, pattern):
    assert option(make_model(), [pattern]) == CASES[pattern] == set(matched_modules(make_model(), [pattern]))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("Module", "is not a name or class of a module in Sequential"),  # every module is a Module
        ("Sequential", "is not a name or class"),  # the model itself
        ("LayerNrom", r"is not a name or class .*, did you mean LayerNorm"),
        ("zzz", r"is not a name or class .*; model\.named_modules\(\) lists them"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_in_the_same_words(option, pattern, hint):
    with pytest.raises(ValueError, match=f"fp32_modules: '{pattern}' {hint}"):
        option(make_model(), [pattern])


def test_a_class_of_the_user_may_be_called_module():
    class Module(nn.Linear):
        pass

    model = nn.Sequential(Module(2, 2), nn.Linear(2, 2))
    assert list(matched_modules(model, ["Module"])) == ["0"]


def test_several_models_share_patterns():
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.LayerNorm(2))
    require_matches([first, second], ["Linear", "LayerNorm"])
    assert found_patterns(first, ["Linear", "LayerNorm"]) == ["Linear"]


@pytest.mark.parametrize("pattern", ["0.norm", "*.norm", "LayerNorm", "_orig_mod.0.norm"])
def test_names_are_those_of_the_model_that_was_wrapped(pattern):
    model = make_model()
    model[0] = checkpoint_wrapper(model[0])
    compiled = torch.compile(model, backend="eager")
    assert matched_modules(compiled, [pattern])["0.norm"] is model[0].norm
    require_matches([compiled], [pattern])
