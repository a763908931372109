"""The command `amp-plugin`, as users type it."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import amp_plugin
from amp_plugin import options
from amp_plugin.casting.rules import TABLES
from amp_plugin.cli import doctor
from amp_plugin.cli.arguments import Device
from amp_plugin.kernels import build
from amp_plugin.kernels.build import NativeCore
from amp_plugin.kernels.cuda import compile as compile_
from amp_plugin.kernels.cuda import register
from tests.commands import amp

DOCS = [*(Path(__file__).parent.parent / "docs").rglob("*.md"), Path(__file__).parent.parent / "README.md"]


@pytest.fixture
def whole_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = NativeCore(library=tmp_path / "lib.so", extension=build, seconds=2.0)
    monkeypatch.setattr(doctor, "native_core", lambda: core)
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Simulate a process that has not loaded the core and cannot find a compiler."""
    monkeypatch.setattr(build, "_core", None)
    monkeypatch.delenv("AMP_PLUGIN_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_it_runs_from_the_sources_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(amp_plugin.__file__).with_name("__main__.py")), run_name="__main__")
    assert capsys.readouterr().out.strip() == amp_plugin.__version__


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["doctor", "--precision", "fp61"], "'fp61' is not one of 'fp16', 'bf16', 'fp32'"),
        (["doctor", "--device", "gpu"], "'gpu' is not one of 'cpu', 'cuda', 'mps', 'xpu'"),
        (["casts", "--by", "modle", __file__], "'modle' is not one of 'cast', 'module', 'op'"),
        (["build", "--cuda", "sm90"], "'sm90' is not a GPU architecture; give it as sm_90"),
        (["casts", "no_such_script.py"], "file 'no_such_script.py' does not exist"),
        (["casts", "."], "file '.' is a folder"),
        (["casts", "json.tool"], "file 'json.tool' does not exist; for a module write: -m json.tool"),
        (["casts", "-m", "no_such.module"], "module 'no_such.module' is not found from"),
    ],
)
def test_what_is_wrong_on_a_command_line(words: list[str], answer: str) -> None:
    result = amp(*words)
    assert result.exit_code == 2
    assert answer in re.sub(r"[\s│]+", " ", result.output)


def test_the_devices_are_those_that_have_rules() -> None:
    assert get_args(get_args(get_args(Device)[0])[0]) == (*TABLES,)


def test_doctor_on_a_healthy_machine(whole_core: None) -> None:
    result = amp("doctor")
    assert result.exit_code == 0, result.output
    assert "All is well." in result.output
    report = json.loads(amp("doctor", "--json").stdout)
    for title in ("versions", "devices", "native_core", "cuda_kernels", "cache", "plan"):
        assert re.search(rf"^{title}$", result.output, re.MULTILINE)
        assert report[title]
    for value in (report["versions"]["torch"], report["cache"]["folder"], report["devices"][0]["name"]):
        assert value in result.output


def test_doctor_says_why_the_core_is_missing(no_core: None) -> None:
    result = amp("doctor")
    assert result.exit_code == 1
    assert re.search(r"reason +there is no C\+\+ compiler on PATH; install g\+\+ 10", result.output)
    assert re.search(r"kernels +torch", result.output)
    assert "compile_seconds" not in result.output
    assert "Something is missing" in result.output


def test_doctor_says_why_the_cache_is_not_used_and_names_a_bad_setting(
    no_core: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "yes")
    result = amp("doctor", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: AMP_PLUGIN_NATIVE='yes' is not allowed; use 0 (fallback) or 1" in result.stderr
    monkeypatch.delenv("AMP_PLUGIN_NATIVE")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = amp("doctor", "--json")
    assert result.exit_code == 1
    assert "others can write" in json.loads(result.stdout)["cache"]["problem"]


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("fp16", "cpu", {"autocast": True, "dtype": "float16", "device": "cpu"}),
        ("bf16", "cuda", {"autocast": True, "dtype": "bfloat16", "loss_scale": None}),
        ("fp32", "cpu", {"autocast": False, "dtype": "float32", "loss_scale": None, "ops": {}, "advice": ""}),
    ],
)
def test_the_plan(whole_core: None, precision: str, device: str, expected: dict[str, Any]) -> None:
    result = amp("doctor", "--json", "--precision", precision, "--device", device)
    plan = json.loads(result.stdout)["plan"]
    assert {name: plan[name] for name in expected} == expected
    if precision == "fp16":
        assert plan["loss_scale"]["init_scale"] == amp_plugin.GradScaler(device).get_scale()
    if precision != "fp32":
        assert sum(plan["ops"].values()) == len(amp_plugin.OpRules.default(device).rules)


def test_the_plan_says_that_its_precision_is_a_default_and_names_packages(whole_core: None) -> None:
    plan = json.loads(amp("doctor", "--json", "--device", "cpu").stdout)["plan"]
    auto = json.loads(amp("doctor", "--json", "--device", "cpu", "--precision", "auto").stdout)["plan"]
    assert plan["precision"] == "fp16"
    assert plan["auto"] == f"fp16 is only the default of --precision; auto would take {auto['precision']}"
    names = plan["one_pass_steps"].split(", ")
    assert len({*names}) == len(names)
    assert {"AdamW", "Muon", "lion_pytorch.Lion", "timm.Lion", "pytorch_optimizer.Lion"} <= {*names}
    assert "default of --precision" not in amp("doctor", "--device", "cpu", "--precision", "fp16").stdout


def test_a_device_that_is_not_here(whole_core: None) -> None:
    result = amp("doctor", "--device", "xpu")
    assert result.exit_code == 1
    assert re.search("problem +torch finds no xpu device on this machine; plan for another", result.output)
    assert not re.search(r"^  kernels +(amp_plugin|torch)$", result.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("AMP_PLUGIN_NATVE", r"did you mean AMP_PLUGIN_NATIVE\?"),
        ("AMP_PLUGIN_INITSCALE", r"did you mean AMP_PLUGIN_INIT_SCALE\?"),
        ("AMP_PLUGIN_XYZ", r"unset it, or use one of these: AMP_PLUGIN_NATIVE, .*AMP_PLUGIN_INIT_SCALE"),
    ],
)
def test_a_misspelt_variable_is_not_well(
    name: str, hint: str, whole_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_PLUGIN_INIT_SCALE", "1024")
    assert amp("doctor").exit_code == 0
    monkeypatch.setenv(name, "0")
    result = amp("doctor")
    assert result.exit_code == 1
    assert re.search(rf"{name} +amp_plugin does not read this variable; {hint}", result.output)
    assert not re.search(r"AMP_PLUGIN_INIT_SCALE +amp_plugin", result.output)
    assert "All is well" not in result.output


def test_the_variables_known_are_those_of_the_adapter() -> None:
    settings = pytest.importorskip("amp_plugin.adapters.option_sources")
    known = {options.PREFIX + name.upper() for name in settings.OPTIONS}
    assert known | set(options.OWN_VARIABLES) == set(options.KNOWN_VARIABLES)
    assert settings.CONFIG in options.OWN_VARIABLES


def test_build(monkeypatch: pytest.MonkeyPatch) -> None:
    core = lambda *, rebuild: (Path("/cache/core.so"), 20.25 if rebuild else 0.0)  # noqa: E731
    monkeypatch.setattr(build, "build_core", core)
    monkeypatch.setattr(compile_, "build_ahead", len)
    assert amp("build").output == "already compiled: /cache/core.so\n"
    result = amp("build", "--rebuild", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"built": True, "core": "/cache/core.so", "seconds": 20.2}
    result = amp("build", "--cuda", "sm_80", "--cuda", "sm_90a")
    assert result.output.endswith("2 CUDA kernels for sm_80, sm_90a are in the cache\n")
    assert json.loads(amp("build", "--cuda", "sm_80", "--json").stdout)["cubins"] == 1


def test_the_packages_named_for_cuda_are_the_dependency_and_the_extra() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    dependency = re.search(r'^  "(cuda-core.*?);', text, re.MULTILINE)
    extra = re.search(r"^cuda = \[(.*?)\]", text, re.MULTILINE)
    assert dependency is not None
    assert extra is not None
    assert shlex.split(register.PACKAGES) == [dependency[1], *re.findall(r'"(.*?)"', extra[1])]


def test_no_message_names_a_package_on_no_index() -> None:
    for file in (*Path(amp_plugin.__file__).parent.rglob("*.py"), *DOCS):
        assert not re.search(r"pip install[^\n]*amp-plugin\[", file.read_text()), file


def test_a_build_that_fails(no_core: None) -> None:
    result = amp("build", "--json")
    assert result.exit_code == 1
    reason = result.stderr.removeprefix("error: ").strip()
    assert json.loads(result.stdout) == {"built": False, "reason": reason}
    assert "no C++ compiler on PATH" in result.stderr


SCRIPT = """
import sys
import torch
assert __name__ == "__main__"
print("arguments:", *sys.argv[1:])
model = torch.nn.Linear(4, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.nn.functional.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2))
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # process groups leave one that names ranks
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.native
@pytest.mark.parametrize(
    ("by", "expected"),
    [("op", ["aten::linear.default", "aten::mse_loss.default"]), ("module", ["Linear", ""])],
)
def test_casts_as_json(by: str, expected: list[str], script: Path) -> None:
    result = amp("casts", "--json", "--by", by, str(script))
    report = json.loads(result.stdout)
    assert result.exit_code == 3
    assert "arguments:" in result.stderr
    assert (report["script"], report["by"]) == (str(script), by)
    assert [(row[by], row["casts"]) for row in report["rows"]] == [*zip(expected, (3, 1), strict=True)]
    assert report["rows"][0]["elements"] == 12 + 8 + 2
    assert report["rows"][0]["bytes"] == 6 * (12 + 8 + 2)


def test_casts_of_a_module(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = script.parent / "cast_trainers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "digits.py").write_text("import cast_trainers\n" + script.read_text())
    (package / "__main__.py").write_text("import sys\nraise SystemExit(len(sys.argv))\n")
    monkeypatch.chdir(script.parent)
    path = list(sys.path)
    as_file, as_module = (
        amp("casts", "--json", *words) for words in ([str(script)], ["-m", "cast_trainers.digits", "one"])
    )
    assert as_module.exit_code == as_file.exit_code, as_module.output
    assert json.loads(as_module.stdout) == {**json.loads(as_file.stdout), "script": "cast_trainers.digits"}
    assert amp("casts", "-m", "cast_trainers", "one", "--two").exit_code == 3
    assert sys.path == path


@pytest.mark.native
@pytest.mark.parametrize(("end", "code"), [("sys.exit('no data')", 1), ("sys.exit()", 0), ("", 0)])
def test_the_exit_code_is_the_scripts(end: str, code: int, script: Path) -> None:
    script.write_text(SCRIPT.replace("sys.exit(3)", end))
    result = amp("casts", str(script))
    assert result.exit_code == code
    assert ("no data" in result.stderr) == ("no data" in end)
    script.write_text(end and f"import sys\n{end}")
    assert amp("casts", str(script)).stdout.startswith(
        f"autocast made no cast in {script}: open torch.autocast"
    )


@pytest.mark.native
def test_an_error_of_the_script_is_not_hidden(script: Path) -> None:
    script.write_text("def fail():\n    raise RuntimeError('of the script')\nfail()")
    python = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    result = amp("casts", str(script))
    assert result.exit_code == python.returncode == 1
    assert result.stdout == ""
    assert result.stderr == python.stderr
    assert result.stderr.endswith("RuntimeError: of the script\n")


@pytest.mark.native
def test_what_was_cast_before_an_error_is_listed(script: Path) -> None:
    script.write_text(SCRIPT.replace("sys.exit(3)", "raise KeyboardInterrupt"))
    result = amp("casts", str(script), "--by", "mine")
    assert result.exit_code == 130
    assert "arguments: --by mine" in result.output
    assert re.search(r"total +4 +", result.output)
    assert re.search(r"Linear +linear +weight +fp32 → bf16 +1 +0 +48 bytes", result.stdout)
    told, error = result.stderr.split("\n", 1)
    assert told.startswith(f"amp-plugin casts: --by stands after {script}, so {script} gets it")
    assert error.startswith('Traceback (most recent call last):\n  File "' + str(script))
    assert "no casts" not in result.output


def test_casts_needs_the_native_core(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_core", None)
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    result = amp("casts", str(script))
    assert result.exit_code == 1
    assert re.search("casts needs the native core.*Unset AMP_PLUGIN_NATIVE", result.stderr, re.DOTALL)


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer needs it
def test_casts_fold_siblings_and_count_compiled_graphs(script: Path) -> None:
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(12)))\n"
        "scale = torch.compile(lambda x: x * 2, backend='eager')\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    scale(net(torch.ones(2, 4)))\n"
    )
    answer = json.loads(amp("casts", "--json", "--by", "module", str(script)).stdout)
    assert {row["module"] for row in answer["rows"]} == {"Sequential.*.*"}
    assert answer["compiled_graphs"] == 1
    every = json.loads(amp("casts", "--json", "--every", "--by", "module", str(script)).stdout)
    assert len(every["rows"]) == 12
    assert "the casts inside the" in amp("casts", str(script)).stdout


def test_a_recorded_run_as_json_is_one_object(script: Path, tmp_path: Path) -> None:
    result = amp("diagnose", "--save", str(tmp_path / "run.pt"), "--json", str(script))
    report = json.loads(result.stdout)
    assert result.exit_code == report["exit_code"] == 3
    assert "arguments:" in result.stderr
    assert report["file"] == str(tmp_path / "run.pt")
    assert (report["results"] > 0, report["steps"]) == (True, 1)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    """Each completion starts the command, so it must not import torch."""
    words = {"COMP_WORDS": "amp-plugin di", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "amp-plugin di"}
    asked = {"_AMP_PLUGIN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    program = (
        "import sys\n"
        "from amp_plugin.cli import app\n"
        "try:\n"
        "    app(prog_name='amp-plugin')\n"
        "finally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "diagnose" in answer.stdout
    assert answer.stderr.strip().endswith("False")
