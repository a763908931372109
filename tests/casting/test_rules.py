"""Op rules: the tables equal torch's registrations; user-defined rules; errors."""

import itertools
import re

import pytest
import torch

import amp_plugin
from amp_plugin.casting.op_names import full_name, overloads_of
from amp_plugin.casting.rules import TABLES, OpRule, OpRules, torch_release
from amp_plugin.casting.rules_in_force import uninstall_kernels
from tests.warm_processes import call

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}
# A CUDA build registers this op for its own use: it repacks cuDNN's weights.
NO_RULE = {"aten::_cudnn_rnn.default"}
SOFTMAX32 = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")


@pytest.mark.parametrize("device", TABLES)
def test_table_equals_torchs_registrations(device):
    """Except for overloads for named tensors, removed in torch 2.13, which torch's own kernels handle."""
    uninstall_kernels()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    names = {full_name(op) for op in registered if op.startswith("aten::")}
    names = {name for name in names if not re.search(r"\.(names_|\w*[Dd]imname)", name)}
    assert set(OpRules.default(device).rules) == names - NO_RULE


def test_with_rule_makes_another_set():
    default = OpRules.default("cuda")
    changed = default.with_rule("aten::softmax.int", "lower_precision")
    assert changed["aten::softmax.int"] is OpRule.LOWER_PRECISION
    assert default["aten::softmax.int"] is OpRule.FP32_SET_OPT_DTYPE
    assert changed.diff(default) == {"aten::softmax.int": ("lower_precision", "fp32_set_opt_dtype")}
    assert changed != default
    assert changed == default.with_rule(torch.ops.aten.softmax.int, OpRule.LOWER_PRECISION)
    assert hash(changed) == hash(default.with_rule("aten::softmax.int", "lower_precision"))
    assert repr(default) == "OpRules.default('cuda')"
    assert "1 unlike the default" in repr(changed)


def test_an_op_name_means_every_functional_overload():
    assert "aten::softmax.int" in overloads_of("aten::softmax")
    assert overloads_of(torch.ops.aten.sum) == overloads_of("aten::sum")
    assert "aten::sum.dim_IntList" in overloads_of("aten::sum")
    assert not any("out" in name for name in overloads_of("aten::sum"))


@pytest.mark.parametrize(
    ("op", "error"),
    [
        ("linear", r"got 'linear', did you mean aten::linear\?"),
        ("aten::linear", r"with_rule\(\) accepts it, but here give aten::linear.default"),
        ("aten::sofmax.int", r"unknown op 'aten::sofmax.int', did you mean aten::softmax.int"),
        (torch.ops.aten.mm.default, "is not a full name.* here give aten::mm.default"),
        (5, "an op is named like .*, got 5"),
    ],
)
def test_rules_are_made_of_full_names_only(op, error):
    with pytest.raises(ValueError, match=error):
        OpRules(device_type="cpu", rules={op: "fp32"})


WRITING = ["aten::mm.out", "aten::addmm_", "aten::add_.Tensor", torch.ops.aten.mm.out]


@pytest.mark.parametrize(
    ("op", "rule", "error"),
    [
        ("aten::sofmax", "fp32", r"unknown op 'aten::sofmax', did you mean aten::softmax"),
        ("aten::softmax.in", "fp32", r"unknown op .*, did you mean aten::softmax.int or (?!.*out)"),
        ("torch.mm", "fp32", r"an op is named like .*, got 'torch.mm', did you mean aten::mm"),
        ("aten.softmax.int", "fp32", "got 'aten.softmax.int', did you mean aten::softmax.int"),
        ("sofmax", "fp32", "got 'sofmax', did you mean aten::softmax"),
        ("aten::mm", "fp33", r"unknown rule 'fp33', did you mean fp32\?; allowed: lower_precision"),
        *(("aten::mm", dtype, r"did you mean fp32\?") for dtype in ("float32", "FP32", torch.float32)),
        ("aten::mm", "bf16", r"unknown rule 'bf16', did you mean lower_precision\?"),
        ("aten::mm.default", "fp32_append_dtype", "no overload that takes a dtype"),
        *((op, "fp32", r"writes into (out|self): .* give a rule to aten::(mm|addmm|add)$") for op in WRITING),
    ],
)
def test_what_is_no_rule_of_an_op_is_an_error_with_the_nearest(op, rule, error):
    with pytest.raises(ValueError, match=error):
        OpRules.default("cpu").with_rule(op, rule)


def test_unknown_arguments_and_devices():
    with pytest.raises(ValueError, match=r"mm.default has no argument 'slef', did you mean self\?; it has"):
        OpRules.default("cpu").with_rule("aten::mm.default", keep={"slef"})
    with pytest.raises(ValueError, match="no autocast rules for device 'tpu'; allowed: cpu, cuda, mps, xpu"):
        OpRules.default("tpu")


def test_the_rule_of_an_op_is_asked_for_by_the_names_that_set_it():
    rules = OpRules.default("cpu")
    for op in ("aten::linear", torch.ops.aten.linear, "aten::mm.default"):
        assert rules[op] is OpRule.LOWER_PRECISION
    assert rules["aten::relu.default"] is OpRule.UNCHANGED
    with pytest.raises(ValueError, match=r"unknown op 'aten::mmm', did you mean aten::mm"):
        rules["aten::mmm"]
    with pytest.raises(ValueError, match="several rules; ask for one of aten::mm.default: lower"):
        rules["aten::mm"]


def test_yaml_round_trip(tmp_path):
    rules = SOFTMAX32.with_rule("aten::mm.default", "lower_precision", keep={"mat2"})
    path = tmp_path / "rules.yaml"
    path.write_text(rules.to_yaml())
    assert f"torch: '{torch_release()}'\n" in rules.to_yaml()
    assert OpRules.from_yaml(path) == rules


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("device: cpu", r"unknown key 'device', did you mean device_type\?; allowed: device_type, rules"),
        ("rules: {}", "the key device_type is missing; give one of cpu, cuda"),
        ("device_type: cpu\nrules: [aten::mm]", "rules: give a mapping of op to rule .*, got ..aten::mm"),
        ("", "a rules file is a mapping .* got None"),
        ("device_type: cpu\ntorch: 2.13", "torch: give the version as text, torch: '2.13', got 2.13"),
        ("device_type: cpu\nbase: torch-3.0", "unknown policy 'torch-3.0'"),
        ("device_type: cpu\nrules: {aten::gone_since: fp32}", "unknown op 'aten::gone_since'"),
        ("device_type: {cpu", "expected ',' or '}'"),
    ],
)
def test_what_is_wrong_with_a_rules_file(tmp_path, text, error):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"rules.yaml: (.|\n)*{error}"):
        OpRules.from_yaml(path)


def test_rules_for_another_device_are_refused():
    with pytest.raises(ValueError, match="'cuda' were given to a region on 'cpu'; use rules.as_policy_of"):
        amp_plugin.autocast("cpu", rules=OpRules.default("cuda"))


@pytest.mark.native
class TestOwnRules:
    x = torch.randn(4, 4, dtype=torch.bfloat16)

    def test_op_gets_another_rule(self):
        def dtype():
            return torch.softmax(self.x, 0).dtype

        with amp_plugin.autocast("cpu", rules=SOFTMAX32):
            assert dtype() is torch.float32
            with amp_plugin.autocast("cpu"):
                assert dtype() is torch.bfloat16
            assert dtype() is torch.float32
            with torch.autocast("cpu", dtype=torch.float16):  # follows the rules of the region around it
                assert dtype() is torch.float32
                assert (self.x.float() @ self.x.float()).dtype is torch.float16
        for region in (amp_plugin.autocast, torch.autocast):
            with region("cpu"):
                assert dtype() is torch.bfloat16

    def test_a_region_without_rules_follows_those_of_the_process(self):
        before = amp_plugin.autocast("cpu")
        amp_plugin.set_default_rules(SOFTMAX32)
        for region, dtype in (
            (torch.autocast("cpu"), torch.float32),
            (amp_plugin.autocast("cpu"), torch.float32),
            (amp_plugin.autocast("cpu", rules=OpRules.default("cpu")), torch.bfloat16),
            (before, torch.bfloat16),
        ):
            with region:
                assert torch.softmax(self.x, 0).dtype is dtype
        amp_plugin.set_default_rules(None)
        with amp_plugin.autocast("cpu"):
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_every_rule(self):
        x = self.x
        default = OpRules.default("cpu")
        with amp_plugin.autocast("cpu", rules=default.with_rule("aten::sum", "fp32_set_opt_dtype")):
            assert x.sum().dtype is torch.float32
            assert x.sum(dtype=torch.float64).dtype is torch.float64
        with amp_plugin.autocast("cpu", rules=default.with_rule("aten::norm.Scalar", "fp32_append_dtype")):
            assert torch.ops.aten.norm.Scalar(x).dtype is torch.float32
            assert torch.ops.aten.norm.Scalar(x.double()).dtype is torch.float64
        with amp_plugin.autocast("cpu", rules=default.with_rule("aten::mm.default", "unchanged")):
            assert torch.mm(x.float(), x.float()).dtype is torch.float32
        with amp_plugin.autocast("cpu", rules=default.with_rule("aten::add.Tensor", "promote")):
            assert (x + x.half()).dtype is torch.float32
        with (
            amp_plugin.autocast("cpu", rules=default.with_rule("aten::exp.default", "banned")),
            pytest.raises(RuntimeError, match="The autocast rules in force ban aten::exp"),
        ):
            x.exp()

    def test_kept_argument_is_not_cast(self):
        rules = OpRules.default("cpu").with_rule("aten::mse_loss.default", "fp32", keep={"target"})
        x = torch.randn(3, dtype=torch.bfloat16)
        with amp_plugin.log_casts() as log, amp_plugin.autocast("cpu", rules=rules):
            torch.ops.aten.mse_loss(x.float(), x)
            torch.ops.aten.mse_loss(x, x.float())
        assert [cast.argument for cast in log.records()] == ["self"]

    def test_custom_op(self):
        @torch.library.custom_op("amp_plugin_tests::twice", mutates_args=())
        def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert x.dtype == y.dtype
            return x * 2

        rules = OpRules.default("cpu").with_rule("amp_plugin_tests::twice", "lower_precision")
        x = torch.ones(2)
        with amp_plugin.autocast("cpu", rules=rules):
            assert twice(x, x).dtype is torch.bfloat16
        with amp_plugin.autocast("cpu"):
            assert twice(x, x).dtype is torch.float32

    @pytest.mark.parametrize("name", ["fill_out", "fill_out.default"])
    def test_what_a_custom_op_writes_into_is_never_cast(self, name):
        with torch.library._scoped_library("amp_plugin_tests", "FRAGMENT") as library:
            library.define("fill_out(Tensor x, Tensor(a!) out) -> ()")
            seen = []

            def fill_out(x, out):
                seen.append((x.dtype, out.dtype))
                out.copy_(x * 2)

            library.impl("fill_out", fill_out, "CPU")
            rules = OpRules.default("cpu").with_rule(f"amp_plugin_tests::{name}", "lower_precision")
            out = torch.zeros(2)
            with amp_plugin.autocast("cpu", rules=rules):
                torch.ops.amp_plugin_tests.fill_out(torch.ones(2), out)
            assert out.tolist() == [2.0, 2.0]
            assert seen == [(torch.bfloat16, torch.float32)]

    def test_a_batch_norm_keeps_its_statistics(self):
        rules = OpRules.default("cpu").with_rule(
            "aten::batch_norm", "lower_precision", keep=["weight", "bias"]
        )
        norm = torch.nn.BatchNorm1d(4)
        with amp_plugin.autocast("cpu", rules=rules):
            norm(torch.randn(8, 4) + 5)
        assert norm.running_mean.abs().min() > 0.1

    def test_cpu_with_the_policy_of_cuda(self):
        rules = OpRules.default("cuda").as_policy_of("cpu")
        x = self.x
        with amp_plugin.autocast("cpu", rules=rules):
            assert torch.softmax(x, 0).dtype is torch.float32
            assert torch.nn.functional.layer_norm(x, (4,)).dtype is torch.float32
            assert x.exp().dtype is torch.float32
            assert torch.mv(x.float(), x[0].float()).dtype is torch.bfloat16
            with pytest.raises(RuntimeError, match="are unsafe to autocast"):
                torch.nn.functional.binary_cross_entropy(x.float().sigmoid(), x.float().sigmoid())

    def test_too_many_rule_sets(self):
        # in a process of its own, because rule sets keep their numbers for the life of a process
        answer = call(make_rule_sets)
        assert "584 rule sets besides the default ones" in answer.stdout


def make_rule_sets():
    """Make rule sets that each differ from the default in one op, until an error. Print that error."""
    default = OpRules.default("cpu")
    try:
        for op, rule in itertools.product(sorted(default.rules), OpRule):
            amp_plugin.autocast("cpu", rules=OpRules(device_type="cpu", rules={**default.rules, op: rule}))
    except ValueError as error:
        print(error)


@pytest.mark.native
def test_a_rule_keeps_an_lstm_in_fp32_where_fp16_has_no_kernel():
    """On the CPU, oneDNN refuses an fp16 LSTM, also under torch.autocast."""
    lstm, rows = torch.nn.LSTM(5, 8, batch_first=True), torch.randn(2, 3, 5)
    wanted = lstm(rows)[0]
    rules = OpRules.default("cpu").with_rule("aten::lstm.input", "fp32")
    with amp_plugin.autocast("cpu", dtype=torch.float16, rules=rules):
        result = lstm(rows)[0]
    assert torch.equal(result, wanted)
    result.sum().backward()
    assert all(param.grad.isfinite().all() for param in lstm.parameters())
