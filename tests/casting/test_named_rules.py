"""Rules of other torch releases: named policies, files that name their release, and the file in the
environment.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import amp_plugin
from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.op_names import full_name, is_registered
from amp_plugin.casting.rules import RELEASES, TABLES, OpRules, listed_rules, torch_release

# The ops that torch registers on each autocast key: device -> releases -> ops. Read in each torch with
# torch._C._dispatch_get_registrations_for_dispatch_key.
REGISTERED = json.loads((Path(__file__).parents[1] / "assets/autocast_registrations.json").read_text())
RECORDED = tuple(REGISTERED["builds"])
OTHER = "2.11" if torch_release() != "2.11" else "2.15"
# Ops for named tensors (removed in 2.13), and cuDNN's repacking of weights. torch's own kernels handle these.
NO_RULE = re.compile(r"\.(names_|\w*[Dd]imname)|aten::_cudnn_rnn\.default")


def registered_in(release: str, device: str) -> set[str]:
    """Return the ops that a release registers on a device's autocast key."""
    groups = REGISTERED["registered"][device].items()
    names = {full_name(op) for releases, ops in groups if release in releases.split() for op in ops}
    return {name for name in names if not NO_RULE.search(name)}


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("release", RECORDED)
def test_lists_equal_what_the_dispatcher_of_that_torch_registers(release, device):
    assert set(listed_rules(device, release)) == registered_in(release, device)


@pytest.mark.parametrize("device", TABLES)
def test_the_installed_torch_by_name_is_the_default(device):
    if torch_release() not in RELEASES:
        pytest.skip(f"torch {torch_release()} has no policy of its own")
    assert OpRules.named(f"torch-{torch_release()}", device) == OpRules.default(device)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", TABLES)
def test_a_policy_leaves_out_what_the_installed_torch_lacks_and_nothing_else(device, release):
    listed = listed_rules(device, release)
    rules = OpRules.named(f"torch-{release}", device).rules
    assert {op: rule.value for op, rule in rules.items()} == {
        op: rule for op, rule in listed.items() if is_registered(op)
    }


def test_an_unknown_policy_is_answered_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"unknown policy 'torch-2.1', did you mean torch-2.1\d.*; allowed: torch-2.11, "
    ):
        OpRules.named("torch-2.1", "cpu")


@pytest.mark.native
def test_a_named_policy_runs_an_op_as_that_torch_does():
    x, weight = torch.randn(2, 8), torch.ones(8)

    def dtype_by(policy: str) -> torch.dtype:
        with amp_plugin.autocast("cpu", rules=OpRules.named(policy, "cuda").as_policy_of("cpu")):
            return torch.nn.functional.rms_norm(x.bfloat16(), (8,), weight.bfloat16()).dtype

    assert dtype_by("torch-2.12") is torch.float32
    assert dtype_by("torch-2.11") is torch.bfloat16  # nothing is cast, because no rule asks for fp32


def test_a_changed_default_is_told_with_the_cure_and_a_base_keeps_the_old_ones(tmp_path):
    if torch_release() in {"2.11", "2.12"}:
        pytest.skip("rms_norm is the change between 2.11 and 2.12")
    path, text = (
        tmp_path / "rules.yaml",
        "device_type: cuda\ntorch: '2.11.0+cu130'\nrules: {aten::mm.default: fp32}",
    )
    path.write_text(text)
    changed = "written for torch 2.11.*aten::rms_norm.default is fp32 and was unchanged.*base: torch-2.11"
    with pytest.warns(UserWarning, match=changed):
        OpRules.from_yaml(path)
    path.write_text(f"{text}\nbase: torch-2.11")
    assert OpRules.from_yaml(path) == OpRules.named("torch-2.11", "cuda").with_rule(
        "aten::mm.default", "fp32"
    )


def test_an_op_that_the_installed_torch_lacks_is_left_out_of_a_file_of_another(tmp_path):
    path, rules = tmp_path / "rules.yaml", "rules: {aten::gone_since: fp32, aten::mm.default: fp32}"
    path.write_text(f"device_type: cpu\ntorch: '{OTHER}.1'\nbase: torch-{OTHER}\n{rules}")
    text = rf"written for torch {OTHER}; in torch \S+ there is no aten::gone_since, its rule is left out$"
    with pytest.warns(UserWarning, match=text):
        read = OpRules.from_yaml(path)
    assert read == OpRules.named(f"torch-{OTHER}", "cpu").with_rule("aten::mm.default", "fp32")
    for head in ("", f"torch: '{torch_release()}'\n"):
        path.write_text(f"device_type: cpu\n{head}{rules}")
        with pytest.raises(ValueError, match="rules.yaml: unknown op 'aten::gone_since'"):
            OpRules.from_yaml(path)


@pytest.mark.native
class TestEnvironment:
    x = torch.randn(4, 4, dtype=torch.bfloat16)

    @pytest.fixture(autouse=True)
    def fresh(self):
        """Forget all regions, because the file is read when the first region of a kind is created."""
        KERNELS.checked.clear()
        yield
        KERNELS.checked.clear()

    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        path = tmp_path / "rules.yaml"
        path.write_text("device_type: cpu\nrules: {aten::softmax.int: fp32}")
        monkeypatch.setenv("AMP_PLUGIN_RULES", str(path))
        return path

    def test_regions_and_torchs_blocks_follow_the_file_unless_they_have_rules_of_their_own(self, file):
        for region, dtype in (
            (amp_plugin.autocast("cpu"), torch.float32),
            (torch.autocast("cpu"), torch.float32),
            (amp_plugin.autocast("cpu", rules=OpRules.default("cpu")), torch.bfloat16),
        ):
            with region:
                assert torch.softmax(self.x, 0).dtype is dtype

    def test_default_rules_that_a_program_sets_win(self, file):
        amp_plugin.set_default_rules(OpRules.default("cpu"))
        for autocast in (amp_plugin.autocast, torch.autocast):
            with autocast("cpu"):
                assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_another_device_is_told(self, file):
        file.write_text("device_type: cuda")
        with pytest.warns(
            UserWarning, match="AMP_PLUGIN_RULES=.*: the rules are for cuda, so autocast on cpu"
        ):
            region = amp_plugin.autocast("cpu")
        with region:
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_a_missing_file_is_an_error(self, file):
        file.unlink()
        with pytest.raises(ValueError, match="AMP_PLUGIN_RULES=.* No such file or directory; give the path"):
            amp_plugin.autocast("cpu")
