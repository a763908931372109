"""Which layers can use which format?

The tests cover the rehearsal, the choice of formats, and the files it writes.
"""

import importlib.util
import itertools
import json
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import amp_plugin
from amp_plugin.formats.layers import format_of
from amp_plugin.tuning.measure import Trials, rules_without_16_bits
from amp_plugin.tuning.placement import SPEED, cost_of, error_of, place
from amp_plugin.tuning.rehearsal import emulated
from amp_plugin.tuning.workload import StepFunction
from tests.commands import amp
from tests.tuning.small_gpt import GPT, workload

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchao"),
]


def rehearsed(model, **options):
    step, batches = workload(model)
    return amp_plugin.rehearse(step, model=model, batches=batches, **options)


def numbers_of(found):
    """Return costs and errors of a rehearsal: layer -> format -> number."""
    costs = {at.name: {name: at.flops / SPEED[name] for name in at.losses} for at in found.layers}
    errors = {at.name: {name: loss.whole for name, loss in at.losses.items()} for at in found.layers}
    return costs, errors


def cheapest(costs, errors, budget):
    """Return the lowest cost among all placements."""
    layers = [*costs]
    placements = (
        dict(zip(layers, names, strict=True)) for names in itertools.product(*(costs[at] for at in layers))
    )
    return min(cost_of(at, costs) for at in placements if error_of(at, errors) <= budget)


@pytest.fixture(scope="module")
def four_formats():
    """Rehearse five layers in four formats: 4^5 placements."""
    return rehearsed(GPT(1), budget=0.05)


@pytest.fixture(scope="module")
def two_formats():
    """Rehearse eight layers in two formats: 2^8 placements."""
    return rehearsed(GPT(2, with_head=False), formats=["mxfp8", "bf16"], budget=0.03)


@pytest.mark.parametrize("fixture", ["four_formats", "two_formats"])
def test_the_search_is_within_5_percent_of_all_placements(fixture, request) -> None:
    costs, errors = numbers_of(request.getfixturevalue(fixture))
    count = {"four_formats": 4**5, "two_formats": 2**8}[fixture]
    assert len([*itertools.product(*costs.values())]) == count
    in_bf16 = error_of(dict.fromkeys(costs, "bf16"), errors)
    worst = error_of({at: max(of, key=of.get) for at, of in errors.items()}, errors)
    gaps = []
    for share in range(1, 40):  # budgets between bf16's own error and that of the cheapest placement
        budget = in_bf16 * (worst / in_bf16) ** (share / 40)
        placement = place(costs, errors, budget)
        assert error_of(placement, errors) <= budget
        gaps.append(cost_of(placement, costs) / cheapest(costs, errors, budget))
    assert max(gaps) <= 1.05


@pytest.mark.whole_run
@pytest.mark.parametrize("fixture", ["four_formats", "two_formats"])
def test_the_search_is_within_5_percent_of_all_placements_that_are_run(fixture, request) -> None:
    """Each placement is emulated and its error measured, so the oracle needs no model of errors."""
    found = request.getfixturevalue(fixture)
    model = GPT(1) if fixture == "four_formats" else GPT(2, with_head=False)
    costs, _ = numbers_of(found)
    step, batches = workload(model)
    trials = Trials(StepFunction(step, model, batches), "cpu", reference=torch.float32)
    best = float("inf")
    for names in itertools.product(*costs.values()):
        placement = dict(zip(costs, names, strict=True))
        if cost_of(placement, costs) >= best:
            continue
        with emulated(model, placement):
            if trials.measure(rules_without_16_bits("cpu")).error <= found.budget:
                best = cost_of(placement, costs)
    assert cost_of(found.placement, costs) <= 1.05 * best


def test_a_budget_below_bf16s_own_error_leaves_all_layers_in_bf16() -> None:
    found = rehearsed(GPT(1), formats=["fp8"], budget=1e-5)
    assert {*found.placement.values()} == {"bf16"}
    assert "all layers stay in bf16, whose own gradient error" in found.headline


def test_the_losses_grow_as_formats_narrow(four_formats) -> None:
    assert four_formats.error <= four_formats.budget
    assert four_formats.cost < 1
    for layer in four_formats.layers:
        by_format = [layer.losses[name] for name in ("bf16", "mxfp8", "nvfp4")]
        for attribute in ("output", "gradient", "whole"):
            values = [getattr(loss, attribute) for loss in by_format]
            assert values == sorted(values), (layer.name, attribute)
        assert 0.001 < by_format[0].output < 0.004
        assert 0.02 < by_format[1].output < 0.05
    assert [layer.name for layer in four_formats.layers][-1] == "head"
    assert four_formats.layers[-1].flops == 6 * 128 * 128 * 128


class WithOutlier(nn.Module):
    """Three layers.

    One input channel of the second is 10 000 times larger than the others, and its weight as much smaller.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.scales = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x):
        return self.third(self.second(self.first(x) * self.scales).relu())


def test_a_planted_outlier_channel_sends_its_layer_to_bf16_under_fp8_tensorwise() -> None:
    torch.manual_seed(1)
    batches = [torch.randn(64, 64)]
    placements = {}
    for planted in (False, True):
        model = WithOutlier()
        if planted:
            model.scales.data[7] = 1e6
            model.second.weight.data[:, 7] *= 1e-6

        def step(x, model=model):
            model(x).square().mean().backward()

        found = amp_plugin.rehearse(step, model=model, batches=batches, formats=["fp8", "bf16"], budget=0.2)
        placements[planted] = found.placement
    assert placements[False] == {"first": "fp8", "second": "fp8", "third": "fp8"}
    assert placements[True] == {"first": "fp8", "second": "bf16", "third": "fp8"}
    losses = {layer.name: layer.losses["fp8"] for layer in found.layers}
    assert losses["second"].underflow > 0.5 > 0.01 > losses["first"].underflow


def test_layers_whose_shapes_a_format_does_not_take_are_not_placed_in_it() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    step = lambda x: model(x).square().mean().backward()  # noqa: E731
    found = amp_plugin.rehearse(step, model=model, batches=[torch.randn(48, 32)], budget=0.5)
    assert {layer.name: [*layer.losses] for layer in found.layers} == {"0": ["fp8", "bf16"], "2": ["bf16"]}
    assert found.placement == {"0": "fp8", "2": "bf16"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"formats": ["mx8"]}, "the format 'mx8' is unknown.*did you mean 'mxfp8'"),
        ({"budget": 5}, "budget=5 is not allowed; give a share between 0 and 1"),
    ],
)
def test_what_is_wrong_is_named(options, text) -> None:
    with pytest.raises(amp_plugin.OptionError, match=text):
        rehearsed(GPT(1), **options)


def test_the_weights_and_gradients_of_the_model_stay() -> None:
    model = GPT(1)
    before = {name: param.clone() for name, param in model.named_parameters()}
    forward = nn.Linear.forward
    rehearsed(model, formats=["fp8"], budget=0.1)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())
    assert nn.Linear.forward is forward


# -- the files that it writes --------------------------------------------------------------------


def test_the_files_place_the_same_layers(four_formats, tmp_path: Path) -> None:
    ours, torchaos, transformer_engines = four_formats.save(tmp_path / "formats.yaml")
    assert yaml.safe_load(ours.read_text()) == four_formats.placement
    model = amp_plugin.convert(GPT(1), "bf16", formats=ours, emulate=True)
    converted = {
        name: format_of(module) or "bf16"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert converted == four_formats.placement
    is_in = runpy.run_path(str(torchaos))["is_in"]
    for name, chosen in four_formats.placement.items():
        assert is_in(chosen)(None, name)
        assert not is_in("another")(None, name)
    settings = yaml.safe_load(transformer_engines.read_text())
    in_bf16 = [name for name, chosen in four_formats.placement.items() if chosen == "bf16"]
    assert (settings is None) == (not in_bf16)


def test_transformer_engine_keeps_the_bf16_layers(tmp_path: Path) -> None:
    import re

    found = rehearsed(GPT(1), formats=["fp8"], budget=0.02)
    in_bf16 = {name for name, chosen in found.placement.items() if chosen == "bf16"}
    assert in_bf16
    assert {*found.placement} - in_bf16
    section = yaml.safe_load(found.to_transformer_engine())["layers_in_bf16"]
    pattern = re.compile(section["layers"]["layer_name_regex_pattern"])
    assert {name for name in found.placement if pattern.match(name)} == in_bf16
    assert section["transformer_engine"] == {"DisableQuantizationLayer": {"enabled": True}}


PROGRAM = """
import copy
import torch
from torch import nn

class Task(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.net = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])

model = Task()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(32, 32)
    with torch.autocast("cpu"):
        for part in model.net:
            x = part(x)
        loss = x.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_command_places_the_layers_of_a_program(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    arguments = ["--formats", "mxfp8,fp8,bf16", "--budget", "10%", "--batches", "2", "--json", "train.py"]
    result = amp("tune", *arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["files"] == ["formats.yaml", "formats_torchao.py", "formats_te.yaml"]
    assert [*answer["placement"]] == ["net.0.0", "net.1.0"]
    assert "mxfp8" in answer["placement"].values()
    assert answer["error_in_bf16"] < answer["error"] <= 0.1
    assert answer["layers"][0]["flops"] == 6 * 32**3
    again = amp("tune", *arguments)
    assert (again.exit_code, "formats.yaml' exists" in again.stderr) == (2, True)
    wrong = amp("tune", "--formats", "fp8", "--for", "casts", "train.py")
    assert (wrong.exit_code, "leave --for and --plot out" in wrong.stderr) == (2, True)
