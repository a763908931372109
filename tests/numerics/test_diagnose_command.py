"""The command `amp-plugin diagnose`, as users type it."""

import json
from pathlib import Path

import pytest

from tests.commands import diagnose as amp

SCRIPT = """\
import sys, torch

def loss_of(x):
    return x.clamp(min=0).log().mean()

print("argument", sys.argv[1])
x = torch.tensor([1.0, -1.0], requires_grad=True)
for _ in range(2):
    loss = loss_of(x)
    loss.backward()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_stops_at_the_op(script: Path) -> None:
    result = amp(str(script), "0")
    assert result.exit_code == 1
    assert result.stdout.startswith("argument 0\n\naten::log.default made -inf in forward, in fp32\n")
    assert "train.py:4 in loss_of: return x.clamp(min=0).log().mean()" in result.stdout
    assert "then    the loss, where a backward pass starts" in result.stdout
    assert "Traceback" not in result.output


def test_keep_going_runs_to_the_end(script: Path) -> None:
    result = amp("--keep-going", str(script), "3")
    assert result.exit_code == 1
    assert result.stdout.count("aten::log.default made -inf in forward") == 1
    assert "(found 2 times)" in result.stdout
    assert "in the backward pass of" not in result.stdout  # this is part of the same finding


def test_json_alone_is_on_standard_output(script: Path) -> None:
    result = amp("--json", str(script), "0")
    answer = json.loads(result.stdout)
    assert answer["script"] == str(script)
    assert [finding["op"] for finding in answer["findings"]] == ["aten::log.default"]
    assert answer["findings"][0]["place"]["line"] == 4
    assert result.stderr == "argument 0\n"


def test_a_clean_script_says_so_and_keeps_its_exit_code(script: Path) -> None:
    script.write_text("import sys, torch\ntorch.ones(2).log().sum().item()\nsys.exit(3)")
    result = amp(str(script))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[0] == "no harmful nan or inf was found"


def test_an_error_of_the_script_is_printed_as_python_does(script: Path) -> None:
    script.write_text("raise RuntimeError('of the script')")
    result = amp(str(script))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.endswith("RuntimeError: of the script\n")


def test_an_infinity_left_by_a_script_that_exits(script: Path) -> None:
    script.write_text("import sys, torch\nkept = torch.zeros(2).log()\nsys.exit(0)")
    result = amp(str(script))
    assert result.exit_code == 1
    assert "still in a tensor at the end of the region" in result.stdout


MIXED = """\
import torch
model = torch.nn.Linear(8, 8)
with torch.autocast("cpu", dtype=torch.bfloat16):
    model(torch.randn(4, 8)).sum().backward()
print("trained")
"""


def test_compare_lists_errors(script: Path) -> None:
    script.write_text(MIXED)
    result = amp("--compare", "fp32", str(script))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("trained\n")
    assert "own/eps" in result.stdout
    assert "Linear " in result.stdout
    answer = json.loads(amp("--compare", "fp64", "--json", str(script)).stdout)
    assert {"aten::addmm.default", "aten::_to_copy.default"} <= {row["op"] for row in answer["rows"]}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--compare", "float32"], "'float32' is not one of 'fp32', 'fp64', 'eager'"),
        (["--save", "run.pt", "--strict"], "leave --keep-going and --strict out"),
        (["--compare", "fp32", "--strict"], "leave --keep-going, --strict and --save out"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], answer: str, script: Path) -> None:
    result = amp(*words, str(script))
    assert result.exit_code == 2
    assert answer in " ".join(result.output.replace("│", " ").split())


def test_a_module_is_run_as_python_does(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    result = amp("-m", "train", "0")
    assert result.exit_code == 1
    assert "train.py:4 in loss_of" in result.stdout
    result = amp("json.tool")
    assert result.exit_code == 2
    assert "for a module write: -m json.tool" in " ".join(result.output.replace("│", " ").split())


def test_an_option_after_the_script_is_passed_on(script: Path) -> None:
    script.write_text("import sys\nprint(sys.argv[1:])")
    result = amp(str(script), "--keep-going", "lr=3", "--save=a b.npz", "--help")
    assert "['--keep-going', 'lr=3', '--save=a b.npz', '--help']" in result.stdout
    (told,) = result.stderr.splitlines()
    assert "gets it; to give it to amp-plugin diagnose" in told


def test_siblings_are_one_finding_with_a_count(script: Path) -> None:
    script.write_text(
        "import torch\n"
        "class Log(torch.nn.Module):\n    def forward(self, x):\n        return x + (x - x).log().clamp(min=-1e9)\n"
        "layers = torch.nn.Sequential(Log(), Log(), Log())\n"
        "layers(torch.ones(3, requires_grad=True)).sum().backward()\n"
    )
    answer = json.loads(amp("--json", "--keep-going", str(script)).stdout)
    (finding,) = answer["findings"]
    assert (finding["module"], finding["count"]) == ("Sequential.2", 3)


@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_functions_are_spoken_of_where_there_are_some(script: Path, compiles: bool) -> None:
    script.write_text(
        f"import torch\nf = {'torch.compile' * compiles}(torch.exp)\nf(torch.ones(2)).sum().item()"
    )
    assert ("compiled functions ran eagerly" in amp(str(script)).stdout) is compiles
