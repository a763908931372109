"""Every supported Python that is installed can parse the sources and import every public name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MINORS = (10, 11, 12, 13, 14)
COMPILE = """
import pathlib, sys
for file in [*pathlib.Path("amp_plugin").rglob("*.py"), *pathlib.Path("recipes").rglob("*.py"), pathlib.Path("amp_plugin_autoload.py")]:
    compile(file.read_bytes(), str(file), "exec")
"""
CAN_IMPORT = "import filelock, safetensors, torch, typer, yaml"
IMPORT = """
import json, warnings
warnings.simplefilter("ignore")
import amp_plugin, amp_plugin.cli
failed = {}
for name in sorted({*amp_plugin.__all__, *dir(amp_plugin)}):
    try:
        getattr(amp_plugin, name)
    except ImportError as error:  # a framework is not installed
        if "pip install" not in str(error):
            failed[name] = repr(error)
    except Exception as error:
        failed[name] = repr(error)
amp_plugin.GradScaler("cpu")
print(json.dumps(failed))
"""


def pythons() -> dict[str, str]:
    """Return interpreters by version: from PYTHON310 and so on, from PATH, and next to the running one."""
    found = {}
    for minor in MINORS:
        beside = sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3"))
        on_path = shutil.which(f"python3.{minor}")
        choices = [os.environ.get(f"PYTHON3{minor}"), *map(str, beside), on_path]
        if chosen := next(filter(None, choices), None):
            found[f"3.{minor}"] = chosen
    return found


def run(python: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUAL")}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "AMP_PLUGIN_NATIVE": "0",  # these checks need no compiler
    }
    command = [python, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in MINORS])
def test_the_sources_are_of_each_python(version: str) -> None:
    if version not in pythons():
        pytest.skip(f"there is no Python {version}")
    done = run(pythons()[version], COMPILE)
    if "python3: command not found" in done.stderr or done.returncode == 127:
        pytest.skip(f"Python {version} is named but not installed")
    assert done.returncode == 0, done.stderr


@pytest.mark.whole_run
@pytest.mark.parametrize("version", [f"3.{minor}" for minor in MINORS])
def test_each_python_imports_every_public_name(version: str) -> None:
    python = sys.executable if version == f"3.{sys.version_info.minor}" else pythons().get(version)
    if python is None or run(python, CAN_IMPORT).returncode:
        pytest.skip(
            f"there is no Python {version} with torch and what the package depends on; name it in PYTHON{version.replace('.', '')}"
        )
    done = run(python, IMPORT)
    assert (done.returncode, done.stdout.strip()) == (0, json.dumps({})), done.stderr
