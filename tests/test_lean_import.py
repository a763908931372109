"""Importing amp_plugin costs little: no framework, no compiler, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import amp_plugin

HEAVY = ("accelerate", "cuda", "lightning", "matplotlib", "pytorch_lightning", "rich", "sklearn", "tensorboard", "transformers", "typer")  # fmt: skip


def loaded_by(statements: str, cache: Path) -> dict[str, object]:
    """Run statements in a new process; returns its modules and whether CUDA was touched."""
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
    environment = {**os.environ, "AMP_PLUGIN_CACHE_DIR": str(cache)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stderr == ""
    return json.loads(answer.stdout)


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    found = loaded_by("import amp_plugin", tmp_path / "cache")
    assert not {"torch", *HEAVY} & {*found["modules"]}
    assert found["ours"] == ["amp_plugin"]


def test_the_public_names_load_no_framework_and_compile_nothing(tmp_path: Path) -> None:
    found = loaded_by(
        "import amp_plugin\nfor name in amp_plugin.__all__: getattr(amp_plugin, name)", tmp_path / "cache"
    )
    torch_alone = loaded_by("import torch", tmp_path / "cache")
    assert not ({*HEAVY} - {"rich"}) & ({*found["modules"]} - {*torch_alone["modules"]})
    assert not found["cuda"]
    assert found["started"] == torch_alone["started"]
    assert not (tmp_path / "cache").exists()


def test_the_command_line_starts_without_torch(tmp_path: Path) -> None:
    found = loaded_by("import amp_plugin.cli", tmp_path / "cache")
    assert "torch" not in found["modules"]


@pytest.mark.parametrize("name", amp_plugin.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(amp_plugin, name)
    assert name in dir(amp_plugin)
    if name != "__version__":
        assert value.__doc__


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'amp_plugin' has no attribute 'GradScalar'.*GradScaler"
    ):
        amp_plugin.GradScalar  # noqa: B018
