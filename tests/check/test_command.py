"""The output, files and exit code of `amp-plugin check`."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from amp_plugin.check.checker import check
from amp_plugin.check.settings import Settings
from tests.commands import ROOT, amp

OLD = "from torch.cuda.amp import GradScaler, autocast\n\nscaler = GradScaler(65536.0)\nwith autocast(True):\n    pass\n"
NEW = 'from torch.amp import GradScaler, autocast\n\nscaler = GradScaler("cuda", 65536.0)\nwith autocast("cuda", enabled=True):\n    pass\n'
STEP = "import torch\nscaler = torch.amp.GradScaler()\nfor batch in data:\n    scaler.scale(model(batch)).backward()\n    optimizer.step()\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty project, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*words):
    """Run the command. Return its exit code and the lines that it printed."""
    answer = amp("check", *words)
    return answer.exit_code, answer.output.splitlines()


def test_a_mistake_is_a_line_and_exit_code_1(folder):
    Path("train.py").write_text(STEP)
    code, lines = checked("train.py")
    assert code == 1
    assert lines[0].startswith("train.py:5:5: AMP002 step() is called past the scaler")
    assert lines[1:] == ["1 file checked, 1 found"]
    Path("train.py").write_text(STEP.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()"))
    assert checked("train.py") == (0, ["1 file checked, nothing found"])


def test_a_file_that_cannot_be_parsed_is_exit_code_2_and_the_others_are_checked(folder):
    Path("a.py").write_text("def f(:\n")
    Path("b.py").write_bytes(b"x = '\xff'\n")
    Path("c.py").write_text(STEP)
    Path("d.ipynb").write_text("[]")
    Path("e.py").write_text("x = 1\0")
    code, lines = checked(".")
    assert code == 2
    assert sum("AMP002" in line for line in lines) == 1
    assert [line.split(":")[0] for line in lines if ": cannot be checked" in line] == [
        "a.py",
        "b.py",
        "d.ipynb",
        "e.py",
    ]
    assert lines[-1] == "1 file checked, 1 found; 4 cannot be checked"


def test_a_fix_can_be_repeated_and_a_diff_changes_nothing(folder):
    Path("old.py").write_text(OLD)
    code, lines = checked("--diff", "old.py")
    assert (code, Path("old.py").read_text()) == (1, OLD)
    assert {"-scaler = GradScaler(65536.0)", '+scaler = GradScaler("cuda", 65536.0)'} < {*lines}
    assert checked("--fix", "old.py") == (0, ["1 file checked, nothing found, 1 fixed"])
    assert Path("old.py").read_text() == NEW
    assert checked("--fix", "old.py") == (0, ["1 file checked, nothing found"])
    assert Path("old.py").read_text() == NEW
    assert checked("--fix", "--diff", "old.py")[0] == 2


FIXES = {
    "import torch\nwith torch.cuda.amp.autocast():\n    x\n": 'import torch\nwith torch.amp.autocast("cuda"):\n    x\n',
    "import torch\nwith torch.cpu.amp.autocast(dtype=d):\n    x\n": 'import torch\nwith torch.amp.autocast("cpu", dtype=d):\n    x\n',
    "from torch.cuda import amp\ns = amp.GradScaler()\n": 'from torch import amp\ns = amp.GradScaler("cuda")\n',
    "from torch.cuda.amp import (\n    autocast as region,\n)\nwith region(\n    enabled=e,\n):\n    x\n": 'from torch.amp import (\n    autocast as region,\n)\nwith region("cuda",\n    enabled=e,\n):\n    x\n',
    "from torch.cuda.amp import custom_bwd, custom_fwd\n\n@custom_fwd\ndef f(x): ...\n@custom_fwd(cast_inputs=d)\ndef g(x): ...\n@custom_bwd\ndef h(x): ...\n": 'from torch.amp import custom_bwd, custom_fwd\n\n@custom_fwd(device_type="cuda")\ndef f(x): ...\n@custom_fwd(device_type="cuda", cast_inputs=d)\ndef g(x): ...\n@custom_bwd(device_type="cuda")\ndef h(x): ...\n',
    "import torch\né = ('é', torch.cuda.amp.GradScaler())\n": "import torch\né = ('é', torch.amp.GradScaler(\"cuda\"))\n",
    "import torch\r\ns = torch.cuda.amp.GradScaler()\r\n": 'import torch\r\ns = torch.amp.GradScaler("cuda")\r\n',
    "from torch.cuda.amp import GradScaler\ndef f(scaler: GradScaler): ...\n": "from torch.amp import GradScaler\ndef f(scaler: GradScaler): ...\n",
}  # fmt: skip


@pytest.mark.parametrize("old", FIXES)
def test_each_way_to_name_torch_cuda_amp_is_rewritten(folder, old):
    Path("old.py").write_bytes(old.encode())
    assert checked("--fix", "old.py")[0] == 0
    assert Path("old.py").read_bytes().decode() == FIXES[old]


@pytest.mark.parametrize("text", [
    "from torch.cuda.amp import autocast\nregion = choose(autocast)\nwith autocast():\n    x\n",
    "from torch.cuda.amp import autocast, common\nwith autocast():\n    x\n",
    "from torch.cuda.amp import autocast\nwith autocast(*options):\n    x\n",
])  # fmt: skip
def test_what_cannot_be_rewritten_whole_is_reported_and_left(folder, text):
    Path("old.py").write_text(text)
    assert checked("--fix", "old.py")[0] == 1
    assert Path("old.py").read_text() == text


@pytest.mark.parametrize("text", [
    "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n",
    "import torch\nif hasattr(torch.amp, 'GradScaler'):\n    s = torch.amp.GradScaler('cuda')\nelse:\n    s = torch.cuda.amp.GradScaler()\n",
])  # fmt: skip
def test_a_choice_by_the_version_of_torch_is_left_alone(folder, text):
    Path("old.py").write_text(text)
    assert checked("old.py")[0] == 0


def test_comments_settings_and_options_silence_rules(folder):
    Path("one.py").write_text(STEP.replace("step()", "step()  # amp: ignore[AMP002]"))
    Path("two.py").write_text(STEP + "# amp: ignore-file[AMP001,AMP002]\n")
    assert checked(".")[0] == 0
    Path("one.py").write_text(STEP.replace("step()", "step()  # amp: ignore[AMP001]"))
    assert checked(".")[0] == 1
    assert checked("--ignore", "AMP002", ".")[0] == 0
    assert checked("--select", "amp001,AMP003", ".")[0] == 0
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nexclude = ["one*"]\n')
    assert checked(".") == (0, ["1 file checked, nothing found"])
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nselect = ["AMP001"]\n')
    assert checked(".")[0] == 0
    assert checked("--select", "AMP0", ".")[0] == 1
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nignore = ["AMP002"]\n')
    assert checked(".")[0] == 0
    assert checked("--select", "AMP002", ".")[0] == 0
    assert checked("--ignore", "AMP001", ".")[0] == 0
    Path("pyproject.toml").unlink()
    Path("one.py").write_text("# amp: ignore-file\n" + STEP)
    assert checked(".")[0] == 0


def test_folders_are_excluded_by_name_and_by_pattern(folder):
    for place in ("src/a.py", "third_party/deep/b.py", "tests/c.py", ".venv/d.py", "build/e.py"):
        Path(place).parent.mkdir(parents=True)
        Path(place).write_text(STEP)
    assert checked(".")[1][-1] == "3 files checked, 3 found"
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nexclude = ["third_party", "tests/*"]\n')
    assert checked(".")[1][-1] == "1 file checked, 1 found"


@pytest.mark.parametrize(("words", "table", "text"), [
    (("--select", "AMP099"), "", "'AMP099' is not a rule; did you mean AMP0"),
    ((), "selected = []", "has no 'selected'; did you mean select"),
    ((), "ignore = 'AMP001'", "ignore = 'AMP001' is not allowed; give a list of texts"),
    ((), "ignore = ", "pyproject.toml: "),
])  # fmt: skip
def test_a_wrong_option_or_setting_is_exit_code_2(folder, words, table, text):
    Path("pyproject.toml").write_text(f"[tool.amp-plugin.check]\n{table}\n")
    answer = amp("check", *words, ".")
    assert answer.exit_code == 2
    assert text in answer.output


def test_a_baseline_holds_when_lines_move_and_reports_what_is_new(folder):
    Path("train.py").write_text(STEP)
    assert checked("--write-baseline", "known.json", ".")[0] == 0
    Path("train.py").write_text("# a line\n" + STEP)
    assert checked("--baseline", "known.json", ".")[0] == 0
    Path("train.py").write_text(STEP + "    optimizer.step()\n")
    assert checked("--baseline", "known.json", ".")[0] == 1
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nbaseline = "known.json"\n')
    Path("train.py").write_text(STEP)
    assert checked(".")[0] == 0
    assert "is not a baseline" in amp("check", "--baseline", "train.py", ".").output


def test_a_baseline_and_patterns_hold_in_each_folder(folder, monkeypatch):
    for place in ("src/train.py", "third_party/train.py"):
        Path(place).parent.mkdir()
        Path(place).write_text(STEP)
    table = '[tool.amp-plugin.check]\nexclude = ["third_party"]\nbaseline = "known.json"\n'
    Path("pyproject.toml").write_text(table)
    assert checked("--write-baseline", "known.json", ".") == (0, ["1 file checked, 1 written to known.json"])
    assert checked(str(folder / "src")) == (0, ["1 file checked, nothing found"])
    monkeypatch.chdir(folder / "src")
    assert checked(".", "..") == (0, ["1 file checked, nothing found"])


def test_a_baseline_is_written_anew_with_what_the_old_one_holds(folder):
    Path("pyproject.toml").write_text('[tool.amp-plugin.check]\nbaseline = "known.json"\n')
    Path("train.py").write_text(STEP)
    Path("known.json").write_text('{"findings": []}')
    for _ in range(2):
        assert checked("--write-baseline", "known.json", ".")[1] == [
            "1 file checked, 1 written to known.json"
        ]
    assert checked(".")[0] == 0


def test_a_diff_is_text(folder):
    Path("train.py").write_text(OLD)
    for output in ("github", "sarif"):
        code, lines = checked("--diff", "--format", output, ".")
        assert (code, lines) == (2, ["error: --diff prints text; leave out --format"])


def notebook(*cells):
    kinds = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    return (
        json.dumps({"cells": [{"cell_type": "markdown", "source": "# x"}, *kinds], "nbformat": 4}, indent=1)
        + "\n"
    )


def test_a_notebook_is_read_cell_by_cell_and_mended(folder):
    first = "%pip install torch\nimport torch\nfiles = !ls"
    Path("a.ipynb").write_text(
        notebook(first, "%%bash\nls", "scaler = torch.cuda.amp.GradScaler()\nprint(scaler)")
    )
    code, lines = checked("a.ipynb")
    assert (code, lines[0][:27]) == (1, "a.ipynb:cell 3:1:10: AMP013")
    assert checked("--fix", "a.ipynb")[0] == 0
    assert Path("a.ipynb").read_text() == notebook(
        first, "%%bash\nls", 'scaler = torch.amp.GradScaler("cuda")\nprint(scaler)'
    )


def test_the_formats_for_machines(folder):
    Path("train.py").write_text(STEP)
    Path("bad.py").write_text("(")
    lines = checked("--format", "github", ".")[1]
    assert lines[0].startswith(
        "::error file=train.py,line=5,col=5,endLine=5,endColumn=21,title=AMP002 step-past-scaler::"
    )
    assert lines[1].startswith("::error file=bad.py::cannot be checked")
    log = json.loads(amp("check", "--format", "sarif", ".").stdout)
    (run,) = log["runs"]
    (result,) = run["results"]
    assert log["version"] == "2.1.0"
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "AMP002"
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "train.py"}, "region": {"startLine": 5, "startColumn": 5, "endLine": 5, "endColumn": 21}}  # fmt: skip
    assert run["invocations"][0]["executionSuccessful"] is False


def test_neither_torch_nor_the_program_is_imported(folder):
    Path("train.py").write_text(STEP + "raise SystemExit('the program ran')\n")
    code = "import sys; sys.argv = ['amp-plugin', 'check', 'train.py']\nfrom amp_plugin.cli import app\ntry:\n    app()\nexcept SystemExit as error:\n    print(error.code, 'torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert answer.stdout.splitlines()[-1] == "1 False"


def seconds(folder):
    """Return the processor time in seconds that a check of a folder takes, and the number of files."""
    start = time.process_time()
    files = check([folder], Settings()).files
    return time.process_time() - start, files


def test_a_hundred_thousand_lines_take_less_than_ten_seconds(tmp_path):
    texts = [path.read_text() for path in sorted(ROOT.glob("recipes/*.py"))]
    lines = number = 0
    while lines < 100_000:
        text = texts[number % len(texts)]
        (tmp_path / f"program_{number}.py").write_text(text)
        lines, number = lines + text.count("\n"), number + 1
    taken, files = seconds(tmp_path)
    assert files == number
    assert taken < 10


@pytest.mark.whole_run
def test_this_repository_takes_less_than_ten_seconds():
    taken, files = seconds(ROOT)
    assert files > 500
    assert taken < 10


def test_the_hook_of_pre_commit_runs_the_command_on_python_files_and_notebooks(folder):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["types_or"]) == ("amp-plugin-check", ["python", "jupyter"])
    program, *words = hook["entry"].split()
    assert program == "amp-plugin"
    Path("train.py").write_text(STEP)
    assert amp(*words, "train.py").exit_code == 1
