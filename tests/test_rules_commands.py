"""`amp-plugin rules`, as users type it."""

import json
from pathlib import Path

import pytest

from amp_plugin.casting.rules import OpRules
from tests.commands import amp


def test_show_lists_each_op_with_its_rule() -> None:
    answer = amp("rules", "show", "torch-2.11", "--device", "cuda", "--json")
    assert answer.exit_code == 0
    listed = {op: rule.value for op, rule in OpRules.named("torch-2.11", "cuda").rules.items()}
    assert json.loads(answer.output) == {"device_type": "cuda", "rules": listed}
    lines = amp("rules", "show", "torch-2.11", "--device", "cuda").output.splitlines()
    assert lines[0].strip() == f"{len(listed)} rules on cuda: torch-2.11"
    assert ["aten::softmax.int", "fp32_set_opt_dtype"] in [line.split() for line in lines]


def test_diff_shows_what_torch_changed() -> None:
    answer = amp("rules", "diff", "torch-2.11", "torch-2.13", "--device", "cuda")
    assert answer.exit_code == 1
    assert [line.split() for line in answer.output.splitlines()[1:]] == [
        ["op", "torch-2.11", "torch-2.13"],
        ["aten::rms_norm.default", "unchanged", "fp32"],
    ]
    same = amp("rules", "diff", "torch-2.12", "torch-2.13", "--device", "cuda")
    assert (same.exit_code, same.output) == (0, "no op is treated differently on cuda\n")


def test_a_file_says_its_device_and_what_it_keeps(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("device_type: xpu\nrules: {aten::mm.default: {rule: fp32, keep: [mat2]}}")
    answer = amp("rules", "diff", str(file), "--json")
    assert json.loads(answer.output) == {
        "device_type": "xpu",
        "ops": {"aten::mm.default": ["fp32, keep mat2", "lower_precision"]},
    }


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["show", "torch-2.1", "--device", "cpu"], "unknown policy 'torch-2.1', did you mean torch-2.1"),
        (["show", "gone.yaml"], "No such file or directory: 'gone.yaml'; give default, a policy such as"),
        (
            ["diff", "FILE", "--device", "cpu"],
            "these rules are for different devices, cpu and xpu; give rules for one device",
        ),
    ],
)
def test_what_is_wrong_on_the_command_line(tmp_path: Path, words: list[str], error: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("device_type: xpu")
    answer = amp("rules", *(str(file) if word == "FILE" else word for word in words))
    assert answer.exit_code == 2
    assert error in answer.output
