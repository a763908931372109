"""Op rules in programs that never import amp_plugin: `amp-plugin run --rules` and AMP_PLUGIN_RULES."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import amp, with_entry_points
from tests.warm_processes import run_program

pytestmark = pytest.mark.native

ATTENTION = """\
import sys
import torch
torch.manual_seed(0)
x = torch.randn(2, 5, 16) * 300
with torch.autocast("cpu", dtype=torch.float16):
    scores = x @ x.transpose(-1, -2)
    y = scores.softmax(-1) @ x
assert not any(name.split(".")[0] == "amp_plugin" for name in globals())
print("finite" if y.isfinite().all() else "nan", sys.argv[1:])
"""
RULES = "device_type: cpu\nrules:\n  aten::matmul: fp32\n  aten::bmm: fp32\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(ATTENTION)
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path


def test_a_program_is_cured_without_being_touched(files: Path) -> None:
    result = amp("run", "--rules", str(files / "rules.yaml"), str(files / "train.py"), "--lr", "3")
    assert result.exit_code == 0, result.output
    assert "finite ['--lr', '3']" in result.stdout
    assert f"torch.autocast on cpu follows {files / 'rules.yaml'}" in result.stderr


def test_rules_that_nothing_reads_are_told_and_what_holds_none_is_refused(files: Path) -> None:
    words = ("run", "--rules", str(files / "rules.yaml"))
    (files / "quiet.py").touch()
    quiet = amp(*words, str(files / "quiet.py"))
    assert quiet.exit_code == 0
    assert "no autocast block on cpu was opened, so nothing has read the rules of" in quiet.stderr
    (files / "rules.yaml").write_text("device_type: cuda\nrules: {aten::mm: fp32}\n")
    other = amp(*words, str(files / "train.py"))
    assert other.exit_code == 0
    assert "rules.yaml: the rules are for cuda, so autocast on cpu follows" in other.stderr
    (files / "rules.yaml").write_text("rules: {aten::mumul: fp32}\n")
    assert amp(*words, str(files / "train.py")).exit_code == 2


@pytest.fixture
def installed(files: Path) -> dict[str, str]:
    return {**with_entry_points(files), "AMP_PLUGIN_RULES": str(files / "rules.yaml")}


def python(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(script)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_environment_binds_rules_where_torch_is_imported(files: Path, installed: dict[str, str]) -> None:
    answer = python(files / "train.py", installed)
    assert answer.stdout == "finite []\n", answer.stderr
    assert answer.stderr == ""
    (files / "ours.py").write_text(ATTENTION.replace("torch.autocast", "__import__('amp_plugin').autocast"))
    answer = python(files / "ours.py", installed)
    assert (answer.stdout, answer.stderr) == ("finite []\n", "")
    assert run_program(files / "train.py").stdout == "nan []\n"  # without the variable
    (files / "rules.yaml").unlink()
    missing = python(files / "train.py", installed)
    assert missing.returncode == 1
    assert "No such file or directory; give the path of a YAML file of rules, or unset the" in missing.stderr


def test_bound_rules_nest() -> None:
    import torch

    from amp_plugin.casting.rules import OpRules
    from amp_plugin.casting.rules_in_force import following, set_default_rules

    def dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    in_fp32 = OpRules.default("cpu").with_rule("aten::matmul", "fp32").with_rule("aten::mm", "fp32")
    with following(in_fp32):
        with following(OpRules.default("cpu")):
            assert dtype() is torch.bfloat16
        assert dtype() is torch.float32
        set_default_rules(OpRules.default("cpu"))
        assert dtype() is torch.bfloat16
        set_default_rules(None)
        assert dtype() is torch.float32
    assert dtype() is torch.bfloat16


@pytest.mark.parametrize("blocks", ["torch", "ours"])
@pytest.mark.parametrize(("opened", "unread"), [("outer", "inner"), ("inner", "outer")])
def test_of_nested_files_each_is_told_if_nothing_reads_it(
    opened: str, unread: str, blocks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    import amp_plugin
    from amp_plugin.casting.bound_rules import bound_autocast

    autocast = torch.autocast if blocks == "torch" else amp_plugin.autocast
    rules = amp_plugin.OpRules.default("cpu").with_rule("aten::mm", "fp32")
    with bound_autocast(rules, "outer"):
        if opened == "outer":
            autocast("cpu").__enter__().__exit__(None, None, None)
        with bound_autocast(rules.with_rule("aten::bmm", "fp32"), "inner"), bound_autocast():
            if opened == "inner":
                autocast("cpu").__enter__().__exit__(None, None, None)
    said = capsys.readouterr().err
    assert f"the rules of {unread};" in said
    assert f"the rules of {opened};" not in said


def test_a_run_inside_leaves_the_rules_of_the_program() -> None:
    from amp_plugin.adapters.session import Session
    from amp_plugin.casting.bound_rules import ours_by_default
    from amp_plugin.casting.rules import OpRules
    from amp_plugin.casting.rules_in_force import number_on, set_default_rules

    Session.forget_rules()  # left by an earlier test in the same process
    set_default_rules(None)
    before = number_on("cpu")
    with ours_by_default():
        ours = number_on("cpu")
        set_default_rules(OpRules.default("cpu").with_rule("aten::mm", "fp32"))
        set_default_rules(None)  # this happens when a run of Accelerate or Lightning ends
        assert number_on("cpu") == ours != before
    assert number_on("cpu") == before


def _block(a: "torch.Tensor") -> "torch.Tensor":
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(a, a.t())


def _old_block(a: "torch.Tensor") -> "torch.Tensor":
    with torch.cpu.amp.autocast():
        return torch.mm(a, a.t())


class _Off(torch.nn.Module):
    def forward(self, a: "torch.Tensor") -> "torch.Tensor":
        with torch.autocast("cpu", enabled=False):
            return torch.mm(a.float(), a.t().float())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:`torch.*:FutureWarning")
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_torchscript_compiles_blocks_of_a_program_that_runs_on_ours(dtype: "torch.dtype | None") -> None:
    from amp_plugin.casting.bound_rules import bound_autocast, ours_by_default

    with ours_by_default(), bound_autocast(dtype=dtype):
        assert torch.jit.script(_block)(torch.randn(4, 8)).dtype is torch.bfloat16
        # A block without a dtype uses the dtype of the run. TorchScript keeps the dtype that it compiled
        # first.
        if sys.version_info < (3, 13):  # from there on torch cannot script it, with its own autocast neither
            assert torch.jit.script(_old_block)(torch.randn(4, 8)).dtype in {dtype, torch.bfloat16}
        assert torch.jit.script(_Off())(torch.randn(4, 8)).dtype is torch.float32
