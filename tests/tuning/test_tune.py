"""Rules are searched by measurement: what is measured, what is chosen, what is written."""

import json
import math
import re
import sys
import warnings
from itertools import combinations
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy

import amp_plugin
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_in_force import rules_on_trial
from amp_plugin.tuning.measure import (
    Measurement,
    Trials,
    gradient_errors,
    rules_without_16_bits,
    saved_bytes,
)
from amp_plugin.tuning.tune import draw
from amp_plugin.tuning.workload import StepFunction, used_ops
from tests.commands import amp

pytestmark = pytest.mark.native
DEFAULT = OpRules.default("cpu")


class Classifier(nn.Module):
    """A residual network whose logits are the largest tensor."""

    def __init__(self, classes: int = 200) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.name = nn.Linear(16, classes)

    def forward(self, x):
        return self.name(x + self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def step_of(model, dtype=torch.bfloat16, scale=1.0):
    def step(batch):
        images, labels = batch
        with amp_plugin.autocast("cpu", dtype=dtype):
            loss = cross_entropy(model(images), labels)
        (scale * loss).backward()

    return step


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 16, generator=generator), torch.randint(200, (64,), generator=generator))
        for _ in range(2)
    ]


class TestRulesOnTrial:
    x = torch.randn(4, 4, dtype=torch.bfloat16)

    def dtype(self, opened) -> torch.dtype:
        with opened:
            return torch.softmax(self.x, 0).dtype

    def test_regions_made_before_and_torchs_blocks_follow_them_and_then_no_longer(self):
        region = amp_plugin.autocast("cpu")
        with rules_on_trial(DEFAULT.with_rule("aten::softmax.int", "fp32")):
            assert self.dtype(region) is self.dtype(torch.autocast("cpu")) is torch.float32
        assert self.dtype(region) is self.dtype(torch.autocast("cpu")) is torch.bfloat16

    def test_an_op_that_the_default_does_not_name_is_not_named_afterwards(self):
        """Inner ops of layer_norm are autocast by their own rules.

        A rule ``unchanged`` for layer_norm would prevent that.
        """
        x = torch.randn(4, 4, dtype=torch.bfloat16)
        with rules_on_trial(DEFAULT.with_rule("aten::einsum", "fp32")), amp_plugin.autocast("cpu"):
            assert torch.einsum("ij,jk->ik", x.float(), x.float()).dtype is torch.float32
        with amp_plugin.autocast("cpu"):
            assert torch.einsum("ij,jk->ik", x.float(), x.float()).dtype is torch.bfloat16

    def test_the_environments_rules_would_win_and_are_refused(self, monkeypatch):
        monkeypatch.setenv("AMP_PLUGIN_RULES", "rules.yaml")
        with (
            pytest.raises(ValueError, match="AMP_PLUGIN_RULES=rules.yaml decides .* unset it"),
            rules_on_trial(DEFAULT),
        ):
            pass


class TestMeasurement:
    def test_saved_bytes_of_ops_whose_saved_tensors_are_known(self):
        x, weight = torch.randn(8, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
        with saved_bytes() as saved:
            y = x @ weight  # saves x; the parameter exists anyway
        assert sum(saved) == 8 * 4 * 4
        with saved_bytes() as saved:
            (y.exp() + y.detach() * y).sum().backward()  # exp saves its result, the product y
        assert sum(saved) == 2 * 8 * 4 * 4

    def test_a_storage_counts_once_and_a_cast_of_a_weight_counts(self):
        x, weight = torch.randn(8, 4), nn.Parameter(torch.randn(4, 4))
        with saved_bytes() as saved, amp_plugin.autocast("cpu"):
            x @ weight, x.clone().requires_grad_() @ weight
        assert sum(saved) == 2 * 8 * 4 * 2 + 4 * 4 * 2  # the inputs in bf16, and the weight's cast once

    def test_what_a_recomputation_saves_is_left_out(self):
        x = torch.randn(8, 4, requires_grad=True)
        with saved_bytes() as saved:
            torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
        assert sum(saved) <= 8 * 4 * 4

    def test_gradient_errors_by_hand(self):
        reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.1]), "zero": torch.zeros(1)}
        gradients = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.3]), "zero": torch.ones(1)}
        whole, mean = gradient_errors(gradients, reference, batch=0)
        assert whole == pytest.approx(math.sqrt((0.25 + 0.04 + 1.0) / 25.01))
        assert mean == pytest.approx(
            (0.1 + 1.0) / 2
        )  # each is at most 1; gradients whose reference is zero are left out

    def test_a_loss_scale_is_divided_out_and_an_overflow_is_no_number(self):
        def whole(*numbers: float) -> float:
            reference = {"a": torch.tensor([3.0, 4.0])}
            return gradient_errors({"a": torch.tensor(numbers)}, reference, batch=0)[0]

        assert whole(1024 * 3.0, 1024 * 4.5) == pytest.approx(0.1)
        assert whole(3.0, math.inf) == math.inf
        assert whole(math.nan, 4.0) == math.inf

    def test_other_parameters_than_before_are_an_error(self):
        with pytest.raises(
            ValueError, match="in batch 0, other parameters have gradients than in the first run: a, b;"
        ):
            gradient_errors({"b": torch.ones(1)}, {"a": torch.ones(1)}, batch=0)

    def test_the_reference_is_the_gradient_of_the_model_in_fp64(self, model, batches):
        trials = Trials(StepFunction(step_of(model), model, batches), "cpu", reference=torch.float64)
        wide = Classifier().double()
        wide.load_state_dict(model.state_dict())
        in_fp32, in_bf16 = trials.measure(rules_without_16_bits("cpu")), trials.measure(DEFAULT)
        for index, (images, labels) in enumerate(batches):
            params = list(wide.parameters())
            exact = torch.autograd.grad(cross_entropy(wide(images.double()), labels), params)
            with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(images), labels)
            rounded = torch.autograd.grad(loss, list(model.parameters()))
            difference = sum((a - b).square().sum() for a, b in zip(rounded, exact, strict=True))
            expected = (difference / sum(b.square().sum() for b in exact)).sqrt().item()
            assert in_bf16.errors[index] == pytest.approx(expected, rel=1e-4)
            assert in_fp32.errors[index] < 2e-6

    def test_used_ops_are_those_the_program_calls(self, model, batches):
        workload = StepFunction(step_of(model), model, batches)
        found = used_ops(lambda: workload.run(lambda *_: None, batches=1), DEFAULT)
        assert set(found) == {
            "aten::linear",
            "aten::layer_norm",
            "aten::gelu",
            "aten::add",
            "aten::cross_entropy_loss",
            "aten::mul",  # this op is outside of the region
        }
        assert found[0] == "aten::linear"

    def test_what_may_grow_is_bounded(self):
        def measured(saved=100.0, cast=100.0, error=1.0, mean=1.0):
            return Measurement(saved_bytes=saved, cast_bytes=cast, errors=(error,), mean_errors=(mean,))

        for goal, changed, is_allowed in (
            ("memory", {"saved": 50, "error": 1.05, "cast": 300}, True),
            ("memory", {"error": 1.06}, False),
            ("memory", {"mean": 1.06}, False),
            ("memory", {"error": math.inf, "mean": math.inf}, False),
            ("accuracy", {"saved": 106, "error": 0.1}, False),
            ("accuracy", {"cast": 106, "error": 0.1}, False),
            ("accuracy", {"cast": 105, "saved": 105}, True),
        ):
            assert measured(**changed).stays_within(0.05, goal, measured()) is is_allowed, changed


@pytest.fixture(scope="module")
def tuning():
    torch.manual_seed(0)
    model = Classifier()
    batches = [(torch.randn(64, 16), torch.randint(200, (64,))) for _ in range(2)]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = amp_plugin.tune(step_of(model), model=model, batches=batches, budget=0.2)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    return found, model, batches


class TestTune:
    def test_the_logits_are_saved_in_16_bits_where_that_keeps_the_error(self, tuning):
        found, _, _ = tuning
        assert found.rules["aten::cross_entropy_loss.default"].value == "lower_precision"
        assert found.is_followed
        assert found.after.saved_bytes < 0.75 * found.before.saved_bytes
        assert found.after.error <= 1.2 * found.before.error

    def test_the_numbers_hold_when_measured_again(self, tuning):
        found, model, batches = tuning
        trials = Trials(StepFunction(step_of(model), model, batches), "cpu", reference=torch.float64)
        for rules, told in ((DEFAULT, found.before), (found.rules, found.after)):
            again = trials.measure(rules)
            assert (again.saved_bytes, again.cast_bytes) == (told.saved_bytes, told.cast_bytes)
            assert again.error == pytest.approx(told.error)

    def test_the_file_is_the_rules_with_their_evidence(self, tuning, tmp_path):
        found, _, _ = tuning
        path = tmp_path / "rules.yaml"
        found.save(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert OpRules.from_yaml(path) == found.rules
        text = path.read_text()
        assert re.search(
            r"# tuned for memory: 1 rule, budget 20%\n# gradients compared with fp64, 2 batches\n", text
        )
        assert f"torch {torch.__version__}" in text
        assert re.search(r"# saved for backward: \S+ kB -> \S+ kB \(-\d\d\.\d %\)\n", text)
        assert text.endswith("rules:\n  aten::cross_entropy_loss: lower_precision\n")

    def test_the_plot_is_a_picture_with_the_chosen_rules_under_the_budget(self, tuning, tmp_path):
        found, _, _ = tuning
        found.plot(tmp_path / "sets.png")
        assert (tmp_path / "sets.png").read_bytes()[:4] == b"\x89PNG"
        axes = Figure(figsize=(9, 6)).subplots()
        draw(found, axes)
        marks = {mark.get_label(): mark.get_offsets().tolist() for mark in axes.collections}
        assert marks["default rules"] == [[1.0, 1.0]]
        ((cost, growth),) = marks["chosen rules"]
        assert cost == found.after.saved_bytes / found.before.saved_bytes
        assert cost < 1
        assert [line.get_ydata()[0] for line in axes.lines] == [1.2]
        assert growth < 1.2
        names = [text for text in axes.texts if text.get_visible()]
        assert "cross_entropy_loss" in {text.get_text() for text in names}
        boxes = [text.get_window_extent() for text in names]
        assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))

    def test_a_model_with_nothing_to_save_keeps_the_default_and_says_so(self):
        model = nn.Linear(8, 8)

        def step(x):
            with amp_plugin.autocast("cpu"):
                y = model(x)
            y.float().sum().backward()

        found = amp_plugin.tune(step, model=model, batches=[torch.randn(4, 8)])
        assert found.keeps_default
        assert found.is_followed
        assert found.rules == DEFAULT
        assert "nothing better was found, the default rules stay" in found.to_yaml()
        assert found.to_yaml().endswith("rules: {}\n")

    @pytest.mark.parametrize("rules", [None, DEFAULT.with_rule("aten::exp", "unchanged")])
    def test_a_step_that_reads_no_rules_is_told_so(self, model, batches, rules):
        """The step has no autocast block, or a block with its own rules."""

        def step(batch):
            with amp_plugin.autocast("cpu", enabled=rules is not None, rules=rules):
                loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()

        found = amp_plugin.tune(step, model=model, batches=batches)
        assert not found.is_followed
        assert "the rules have no effect" in found.headline
        assert "open autocast for cpu around the forward pass, and pass no rules= to it" in found.to_yaml()

    def test_an_overflow_in_fp16_is_cured_by_the_op_that_overflows_alone(self, batches):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.query, self.key, self.name = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(64, 200)

            def forward(self, x):
                scores = (300 * self.query(x)) @ (300 * self.key(x)).T
                return self.name((scores / 300**2).softmax(-1))

        torch.manual_seed(0)
        model = Attention()
        step = step_of(model, torch.float16, scale=256.0)
        found = amp_plugin.tune(step, model=model, batches=batches, goal="accuracy")
        assert (found.before.failed, found.after.failed) == (2, 0)
        assert [(change.op, change.rule.value) for change in found.changes] == [("aten::matmul", "fp32")]
        assert "# batches that overflow: 2 -> 0\n" in found.to_yaml()
        draw(found, axes := Figure().subplots())
        assert not axes.lines, "a cure has no budget"
        assert found.headline == (
            "tuned for accuracy: 1 rule, without which every batch overflows; no budget was applied"
        )
        with pytest.raises(ValueError, match="no batch has finite gradients .* goal='accuracy'"):
            amp_plugin.tune(step, model=model, batches=batches)

    def test_what_no_precision_cures_is_an_error(self, model, batches):
        def step(batch):
            with amp_plugin.autocast("cpu"):
                loss = model(batch[0]).sum() * math.inf
            loss.backward()

        with pytest.raises(
            RuntimeError, match="even with all ops in fp32, so the precision is not the reason"
        ):
            amp_plugin.tune(step, model=model, batches=batches, goal="accuracy", reference="fp32")

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            (
                {"goal": "speed"},
                "goal='speed' is not one of 'memory', 'casts', 'accuracy'; did you mean 'casts'?",
            ),
            ({"budget": -1}, "budget=-1 (-100%) is not allowed; give a share from 0 to below 10 (1000 %)"),
            (
                {"budget": 20.0},
                "budget=20.0 (2000%) is not allowed; give a share from 0 to below 10 (1000 %)",
            ),
            ({"budget": float("nan")}, "budget=nan (nan%) is not allowed; give a share from 0"),
            ({"reference": "fp16"}, "reference='fp16' is not allowed; give 'fp64' or 'fp32'"),
            ({"batches": []}, "tune(batches=[]): give at least one batch"),
        ],
    )
    def test_what_is_not_allowed(self, model, batches, options, error):
        with pytest.raises(ValueError, match=re.escape(error)):
            amp_plugin.tune(step_of(model), **{"model": model, "batches": batches, **options})

    def test_a_step_that_steps_or_does_not_go_backward(self, model, batches):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def stepping(batch):
            step_of(model)(batch)
            optimizer.step()

        with pytest.raises(
            ValueError, match=r"the step changed the weight norm.weight; leave out optimizer.step\(\)"
        ):
            amp_plugin.tune(stepping, model=model, batches=batches)
        with pytest.raises(ValueError, match=r"gave no parameter a gradient; it has to call backward\(\)"):
            amp_plugin.tune(lambda batch: None, model=model, batches=batches)


SCRIPT = """
import os, sys, torch
from torch import nn
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
print("not to be seen")
os.makedirs("runs")
open("runs/log.txt", "w").close()
for step in range(5):
    x, y = torch.randn(32, 16), torch.randint(300, (32,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


class TestCommand:
    def test_a_script_is_tuned(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        script, rules = tmp_path / "train.py", tmp_path / "rules.yaml"
        script.write_text(SCRIPT)
        options = ["-o", rules, "--plot", "a.png", "--device", "cpu", "--batches", 2, "--budget", "50%"]
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            answer = amp("tune", *options, script, "0.1")
        assert answer.exit_code == 0, answer.output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "rules.yaml", "train.py"]
        assert "not to be seen" not in answer.output
        assert re.search(r"saved for backward +\S+ kB +\S+ kB +-\d+\.\d %", answer.output)
        assert OpRules.from_yaml(rules)["aten::cross_entropy_loss.default"].value == "lower_precision"
        assert torch.autograd.backward.__module__ == "torch.autograd"

    def test_an_error_without_end_is_a_word_in_json(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)  # trials run in copies of this folder
        script = tmp_path / "train.py"
        text = SCRIPT.replace("bfloat16", "float16").replace("nn.LayerNorm(16), ", "")
        script.write_text(text.replace("torch.randn(32, 16)", "torch.full((32, 16), 6e4)"))
        options = ["-o", tmp_path / "rules.yaml", "--device", "cpu", "--batches", 1, "--for", "accuracy"]
        answer = amp("tune", *options, "--json", script, "0.1")
        assert answer.exit_code == 0, answer.output
        found = json.loads(answer.stdout, parse_constant=pytest.fail)
        assert found["before"]["error"] == "inf"
        assert found["after"]["error"] < 1

    @pytest.mark.parametrize(
        ("words", "code", "error"),
        [
            (["gone.py"], 2, "file 'gone.py' does not exist"),
            (
                ["--for", "speed", "SCRIPT"],
                2,
                "'speed' is not one of 'memory', 'casts', 'accuracy'",
            ),
            (["-o", "no/rules.yaml", "SCRIPT"], 2, "there is no folder 'no' for rules.yaml; make it"),
            (["-o", "SCRIPT", "SCRIPT"], 2, "train.py' exists; give another name, or --force to write over"),
            (["--plot", "SCRIPT", "SCRIPT"], 2, "train.py' exists; give another name, or --force"),
            (["--plot", "sets.xyz", "SCRIPT"], 1, "cannot draw into 'sets.xyz'; let its name end in"),
            (["--budget", "2000%", "SCRIPT"], 1, "budget=20.0 (2000%) is not allowed; give a share from 0"),
            (["--budget", "much", "SCRIPT"], 2, "'much' is not a percentage or a fraction; give 5% or 0.05"),
            (
                ["--device", "cpu", "SCRIPT", "0.1"],
                1,
                "ended with exit code 0 after 0 backward passes, but 4 are needed; check that it runs without tune and calls backward()",
            ),
        ],
    )
    def test_what_is_wrong(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words, code, error):
        monkeypatch.chdir(tmp_path)
        script = tmp_path / "train.py"
        script.write_text("print('no training')")
        answer = amp("tune", *(script if word == "SCRIPT" else word for word in words))
        assert answer.exit_code == code
        assert error in answer.output

    def test_without_matplotlib_it_ends_before_the_tuning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
        Path("train.py").write_text("print('it ran')")
        answer = amp("tune", "--plot", "sets.png", "train.py")
        assert answer.exit_code == 1
        assert "a plot needs matplotlib" in answer.output
        assert "backward passes" not in answer.output

    def test_a_rules_file_is_written_over_when_that_is_wanted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(SCRIPT)
        Path("rules.yaml").write_text("# mine")
        options = ["--device", "cpu", "--batches", 1]
        assert amp("tune", *options, "train.py", "0.1").exit_code == 2
        assert Path("rules.yaml").read_text() == "# mine"
        assert amp("tune", *options, "--force", "train.py", "0.1").exit_code == 0
        assert OpRules.from_yaml("rules.yaml").device_type == "cpu"
