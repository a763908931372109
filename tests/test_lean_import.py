"""Importing amp_plugin loads no framework, runs no compiler and starts no GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amp_plugin
from tests.warm_processes import ROOT, run_program

HEAVY = ("accelerate", "cuda", "lightning", "matplotlib", "pytorch_lightning", "rich", "sklearn", "tensorboard", "transformers", "typer")  # fmt: skip


def loaded_by(statements: str, cache: Path, *, with_torch: bool = False) -> dict[str, object]:
    """Run statements in a new process.

    Return its modules, the processes it started, and whether it used CUDA.
    """
    code = f"""
import json, os, subprocess, sys
started = []
run = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda self, *args, **kwargs: (started.append(str(args)), run(self, *args, **kwargs))[1]
{statements}
torch = sys.modules.get("torch")
print(json.dumps({{
    "modules": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "ours": sorted(name for name in sys.modules if name.startswith("amp_plugin")),
    "cuda": bool(torch and torch.cuda.is_initialized()),
    "started": started,
}}))
"""
    program, cache_folder = cache.with_suffix(".py"), {"AMP_PLUGIN_CACHE_DIR": str(cache)}
    program.write_text(code)
    if with_torch:
        answer = run_program(program, cache_folder)
    else:
        answer = subprocess.run(
            [sys.executable, program],
            env={**os.environ, "PYTHONPATH": str(ROOT), **cache_folder},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (answer.returncode, answer.stderr) == (0, "")
    return json.loads(answer.stdout)


def test_import_loads_nothing_heavy_and_the_command_line_no_torch(tmp_path: Path) -> None:
    found = loaded_by("import amp_plugin", tmp_path / "cache")
    assert not {"torch", *HEAVY} & {*found["modules"]}
    assert found["ours"] == ["amp_plugin"]
    assert "torch" not in loaded_by("import amp_plugin.cli", tmp_path / "cache")["modules"]


def test_the_public_names_load_no_framework_and_compile_nothing(tmp_path: Path) -> None:
    adapters = {"AmpAccelerator", "AmpKwargs", "AmpMonitor", "AmpPrecision", "FabricAmpPrecision"}
    assert adapters < {*amp_plugin.__all__}
    names = [name for name in amp_plugin.__all__ if name not in adapters]
    statements = f"import amp_plugin\nassert all(hasattr(amp_plugin, name) for name in {names})"
    found = loaded_by(statements, tmp_path / "cache")
    torch_alone = loaded_by("import torch", tmp_path / "cache")
    assert not ({*HEAVY} - {"rich"}) & ({*found["modules"]} - {*torch_alone["modules"]})
    assert not found["cuda"]
    assert found["started"] == torch_alone["started"]
    assert not (tmp_path / "cache").exists()


def test_an_unknown_name_lists_the_known_ones() -> None:
    text = r"no attribute 'GradScalar'.*AmpPrecision.*; did you mean GradScaler\?"
    with pytest.raises(AttributeError, match=text):
        amp_plugin.GradScalar  # noqa: B018


@pytest.mark.parametrize(("name", "own"), [("AmpPrecision", "lightning"), ("AmpAccelerator", "accelerate")])
def test_a_name_of_an_adapter_loads_its_framework_alone(tmp_path: Path, name: str, own: str) -> None:
    found = loaded_by(f"from amp_plugin import {name}", tmp_path / "cache", with_torch=True)
    others = {"accelerate", "lightning", "pytorch_lightning"} - {own}
    assert f"amp_plugin.adapters.{own}" in found["ours"]
    assert not {f"amp_plugin.adapters.{other}" for other in others} & {*found["ours"]}
    # torchmetrics, which lightning imports, may import transformers, and some of its releases import accelerate.
    alone = loaded_by(f"import {own}", tmp_path / "alone", with_torch=True)
    assert not others & ({*found["modules"]} - {*alone["modules"]})


def test_the_lightning_names_are_for_the_package_of_the_program(tmp_path: Path) -> None:
    found = loaded_by(
        "import pytorch_lightning\nfrom amp_plugin import AmpPrecision\n"
        "assert issubclass(AmpPrecision, pytorch_lightning.plugins.MixedPrecision)",
        tmp_path / "cache",
        with_torch=True,
    )
    assert "lightning" not in found["modules"]


def test_a_missing_framework_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("amp_plugin.adapters", "accelerate"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        ImportError, match=r"AmpAccelerator is for Accelerate.*pip install 'accelerate>=1.15'"
    ):
        amp_plugin.AmpAccelerator  # noqa: B018


def test_what_to_install_is_what_the_extras_say() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for extra, requirement in amp_plugin._REQUIREMENTS.items():
        assert f'{extra} = ["{requirement}"]' in project


USE = """
import torch
from torch.optim import optimizer as torchs
from amp_plugin import GradScaler, autocast
started.clear()  # torch starts a process as it is imported
model = torch.nn.Linear(2, 2)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
with autocast("cpu", dtype=torch.bfloat16):
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
scaler.step(optimizer)
started += [str(hook) for hook in (*torchs._global_optimizer_pre_hooks.values(), *torchs._global_optimizer_post_hooks.values())]
started += ["tag"] * bool(torch.compiler.config.cache_key_tag)
started += [name for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU") if "amp_plugin" in name]
started += ["core"] * hasattr(torch.ops.amp_plugin, "_cuda_uploads")
"""


def test_without_the_core_nothing_reaches_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what docs/reference/stability.md says about AMP_PLUGIN_NATIVE=0."""
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    assert loaded_by(USE, tmp_path / "cache")["started"] == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13", "3.14"])
def test_each_public_name_loads_in_each_python_that_has_torch(version: str, tmp_path: Path) -> None:
    name = version.replace(".", "")
    python = os.environ.get(f"PYTHON{name}") or shutil.which(f"python{version}")
    if (
        python is None
        or subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"there is no Python {version} with torch; PYTHON{name} may name one")
    code = "import amp_plugin; [getattr(amp_plugin, name) for name in amp_plugin.__all__]; amp_plugin.GradScaler('cpu')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AMP_PLUGIN_NATIVE": "0"}
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
