"""Rules of other torch releases: named policies, files that note their torch, the environment's file."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

import amp_plugin
from amp_plugin.casting.dispatcher import KERNELS
from amp_plugin.casting.op_names import full_name, is_registered
from amp_plugin.casting.rules import RELEASES, TABLES, OpRules, listed_rules, torch_release

# What torch registers on each autocast key, read in each torch with
# torch._C._dispatch_get_registrations_for_dispatch_key: device -> releases that register them -> ops.
REGISTERED = json.loads((Path(__file__).parents[1] / "assets/autocast_registrations.json").read_text())
RECORDED = tuple(REGISTERED["builds"])
# For named tensors, gone since 2.13, and cuDNN's repacking of weights: torch's own kernels see to them.
NO_RULE = re.compile(r"\.(names_|\w*[Dd]imname)|aten::_cudnn_rnn\.default")
OTHER = "2.11" if torch_release() != "2.11" else "2.15"


def registered_in(release: str, device: str) -> set[str]:
    """What a release registers on a device's key."""
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


@pytest.mark.parametrize(
    ("given", "hint"),
    [("torch-2.1", ", did you mean torch-2.1"), ("xyz", ";")],
)
def test_an_unknown_policy_is_answered_with_those_there_are(given, hint):
    with pytest.raises(ValueError, match=re.escape(f"unknown policy {given!r}{hint}")) as error:
        OpRules.named(given, "cpu")
    assert str(error.value).endswith("; allowed: torch-2.11, torch-2.12, torch-2.13, torch-2.14, torch-2.15")
    with pytest.raises(ValueError, match="no autocast rules for device 'tpu'; allowed: cpu, cuda"):
        OpRules.named("torch-2.13", "tpu")


@pytest.mark.native
def test_a_named_policy_runs_an_op_as_that_torch_does():
    x, weight = torch.randn(2, 8), torch.ones(8)

    def dtype_by(policy: str) -> torch.dtype:
        with amp_plugin.autocast("cpu", rules=OpRules.named(policy, "cuda").as_policy_of("cpu")):
            return torch.nn.functional.rms_norm(x.bfloat16(), (8,), weight.bfloat16()).dtype

    assert dtype_by("torch-2.12") is torch.float32
    assert dtype_by("torch-2.11") is torch.bfloat16  # nothing is cast, and nothing asked for fp32


class TestFilesOfAnotherTorch:
    def read(self, folder: Path, text: str) -> tuple[OpRules, list[str]]:
        path = folder / "rules.yaml"
        path.write_text(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rules = OpRules.from_yaml(path)
        return rules, [str(warning.message).removeprefix(f"{path} ") for warning in caught]

    def test_a_changed_default_is_told_with_the_cure(self, tmp_path):
        if torch_release() in {"2.11", "2.12"}:
            pytest.skip("rms_norm is the change between 2.11 and 2.12")
        _, (text,) = self.read(tmp_path, "device_type: cuda\ntorch: '2.11'\nrules: {aten::mm.default: fp32}")
        since = f"was written for torch 2.11; in torch {torch_release()} the default of "
        assert text.startswith(f"{since}aten::")
        assert "aten::rms_norm.default is fp32 and was unchanged" in text
        assert text.endswith(" (base: torch-2.11 in the file keeps the old ones)")

    def test_a_base_keeps_the_defaults_of_its_torch_and_nothing_is_told(self, tmp_path):
        rules, texts = self.read(
            tmp_path,
            "device_type: cuda\ntorch: '2.11.0+cu130'\nbase: torch-2.11\nrules: {aten::mm.default: fp32}",
        )
        assert texts == []
        assert rules == OpRules.named("torch-2.11", "cuda").with_rule("aten::mm.default", "fp32")

    def test_an_unknown_op_is_an_error(self, tmp_path):
        for head in ("", f"torch: '{OTHER}'\n"):
            with pytest.raises(ValueError, match="rules.yaml: unknown op 'aten::gone_since'"):
                self.read(tmp_path, f"device_type: cpu\n{head}rules: {{aten::gone_since: fp32}}")

    def test_what_is_written_says_its_torch_and_reads_without_a_word(self, tmp_path):
        rules = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
        assert f"torch: '{torch_release()}'\n" in rules.to_yaml()
        assert self.read(tmp_path, rules.to_yaml()) == (rules, [])

    @pytest.mark.parametrize(
        ("head", "error"),
        [
            ("torch: 2.13", "torch: give the version as text, torch: '2.13', got 2.13"),
            ("base: torch-3.0", "unknown policy 'torch-3.0'"),
        ],
    )
    def test_a_wrong_head(self, tmp_path, head, error):
        with pytest.raises(ValueError, match=rf"rules.yaml: {error}"):
            self.read(tmp_path, f"device_type: cpu\n{head}\nrules: {{}}")


@pytest.mark.native
class TestEnvironment:
    x = torch.randn(4, 4, dtype=torch.bfloat16)

    @pytest.fixture(autouse=True)
    def fresh(self):
        """The file is read when the first region of a kind is made: let there be none."""
        KERNELS.checked.clear()
        yield
        KERNELS.checked.clear()
        amp_plugin.set_default_rules(None)

    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        path = tmp_path / "rules.yaml"
        path.write_text("device_type: cpu\nrules: {aten::softmax.int: fp32}")
        monkeypatch.setenv("AMP_PLUGIN_RULES", str(path))
        return path

    def test_regions_and_torchs_blocks_follow_the_file(self, file):
        with amp_plugin.autocast("cpu"):
            assert torch.softmax(self.x, 0).dtype is torch.float32
        with torch.autocast("cpu"):
            assert torch.softmax(self.x, 0).dtype is torch.float32

    def test_a_regions_own_rules_win(self, file):
        with amp_plugin.autocast("cpu", rules=OpRules.default("cpu")):
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_default_rules_that_a_program_sets_win(self, file):
        amp_plugin.set_default_rules(OpRules.default("cpu"))
        with amp_plugin.autocast("cpu"):
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16
        with torch.autocast("cpu"):
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_another_device_is_told(self, file):
        file.write_text("device_type: cuda")
        with pytest.warns(
            UserWarning, match=r"AMP_PLUGIN_RULES=\S+: the rules are for cuda; autocast on cpu"
        ):
            region = amp_plugin.autocast("cpu")
        with region:
            assert torch.softmax(self.x, 0).dtype is torch.bfloat16

    def test_a_missing_file_is_an_error(self, file):
        file.unlink()
        with pytest.raises(
            ValueError, match=r"AMP_PLUGIN_RULES=\S+: No such file or directory; give the path of a YAML file"
        ):
            amp_plugin.autocast("cpu")

    def test_lightning_follows_it_too(self, file):
        pytest.importorskip("lightning")
        from lightning import Fabric

        fabric = Fabric(accelerator="cpu", devices=1, plugins=amp_plugin.FabricAmpPrecision("bf16"))
        model = fabric.setup(torch.nn.Softmax(dim=0))
        seen = []
        model.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        model(self.x)
        assert seen == [torch.float32]
