"""The package is built, installed elsewhere and type-checked, as users get it."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import amp_plugin

ROOT = Path(__file__).parent.parent
CONSUMER = '''
"""Someone else's training step, fully typed."""

import torch

import amp_plugin


def step(model: torch.nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    scaler = amp_plugin.GradScaler("cpu", init_scale=1024.0)
    with amp_plugin.autocast("cpu", dtype=torch.float16):
        loss: torch.Tensor = model(batch).sum()
    torch.autograd.backward(scaler.scale(loss))
    scaler.step(optimizer)
    return scaler.get_scale()


rule: amp_plugin.OpRule = amp_plugin.OpRules.default("cpu")["aten::softmax.int"]
'''
WRONG = """
import amp_plugin

version: int = amp_plugin.__version__
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words, variables = [str(word) for word in command], {**os.environ, **environment}
    return subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build a wheel from the sdist, as it would be on a package index."""
    folder = tmp_path_factory.mktemp("dist")
    answer = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.mark.slow
def test_the_wheel_holds_what_runs_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    in_tree = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "amp_plugin").rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml", ".cpp", ".h", ".cu", ".cuh", ".typed", ".jinja"}
    }
    assert "amp_plugin_autoload.py" in names
    assert {name for name in names if name.startswith("amp_plugin/")} == in_tree | {"amp_plugin/py.typed"}
    assert {name.partition("/")[0] for name in names} == {
        "amp_plugin",
        "amp_plugin_autoload.py",
        f"amp_plugin-{amp_plugin.__version__}.dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_sdist_holds_the_whole_project(built: tuple[Path, Path]) -> None:
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "tests/test_packaging.py"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "runs", "site"))]


def test_an_editable_installation_has_its_own_copy_of_what_torch_loads(monkeypatch) -> None:
    """Every `import torch` failed where the checkout was moved or deleted after `pip install -e`."""
    monkeypatch.syspath_prepend(ROOT)
    from hatch_build import BundleHook

    for version, copied in (("standard", {}), ("editable", {"amp_plugin_autoload.py"})):
        data = {"force_include": {}, "force_include_editable": {}}
        BundleHook(str(ROOT), {}, None, None, "", "wheel").initialize(version, data)
        assert {*data["force_include_editable"].values()} == {*copied}
        assert all(Path(source).is_file() for source in data["force_include_editable"])


def installed(wheel: Path, folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """Make an environment without a compiler that uses this environment's torch."""
    venv.create(folder / "empty", with_pip=False)
    programs = folder / "empty" / "bin"
    python = programs / "python"
    variables = {"PATH": str(programs), "AMP_PLUGIN_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": ""}
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    answer = run(*pip, cwd=folder, **variables)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    asked = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)
    site = Path(asked.stdout.strip())
    (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return programs, site, variables


REGION = """
import pathlib, time, torch, amp_plugin
start = time.perf_counter()
with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
    product = torch.ones(2, 2) @ torch.ones(2, 2)
seconds = time.perf_counter() - start
from amp_plugin.kernels.build import native_core
core = native_core()
print(pathlib.Path(amp_plugin.__file__).parents[1], product.dtype, core.loaded, core.seconds, f"{seconds:.2f}")
"""


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs, site, variables = installed(built[0], tmp_path)
    worked = run(programs / "python", "-W", "ignore", "-c", REGION, cwd=tmp_path, **variables)
    assert worked.stdout.startswith(f"{site} torch.bfloat16 False"), worked.stderr
    version = run(programs / "amp-plugin", "--version", cwd=tmp_path)
    assert version.stdout.strip() == amp_plugin.__version__
    doctor = run(programs / "amp-plugin", "doctor", cwd=tmp_path, **variables)
    assert doctor.returncode == 1
    assert "no C++ compiler" in doctor.stdout


@pytest.mark.whole_run
def test_a_wheel_with_the_core_inside_needs_no_compiler(tmp_path: Path) -> None:
    """Install the result of `make wheels` into a new environment. The first region opens within 3 s."""
    core, dist = tmp_path / "core", tmp_path / "dist"
    write = "import sys, pathlib; from amp_plugin.kernels.build import write_cores; write_cores(pathlib.Path(sys.argv[1]))"
    answer = run(sys.executable, "-c", write, core, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", dist, ROOT)
    answer = run(*command, cwd=tmp_path, AMP_PLUGIN_BUNDLE=str(core))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (wheel,) = dist.glob("*-manylinux_*_x86_64.whl")
    programs, site, variables = installed(wheel, tmp_path)
    worked = run(programs / "python", "-I", "-W", "error", "-c", REGION, cwd=tmp_path, **variables)
    printed, _, seconds = worked.stdout.strip().rpartition(" ")
    assert printed == f"{site} torch.bfloat16 True 0.0", worked.stderr
    assert float(seconds) < 3


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.whole_run), "pyright"])
def test_types_reach_a_consumer(checker: str, tmp_path: Path) -> None:
    python, settings = sys.executable, ROOT / "pyproject.toml"
    # Use the options and the cache of `make lint`, because reading torch's modules takes a minute.
    mypy = ["mypy", "--strict", "--config-file", settings, "--cache-dir", ROOT / ".mypy_cache"]
    pyright = ["basedpyright", "--pythonpath", python, "--level", "error"]
    command = [python, "-m", *{"mypy": mypy, "pyright": pyright}[checker]]
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    files = (tmp_path / "consumer.py", tmp_path / "wrong.py")
    answer = run(*command, *files, cwd=tmp_path, PYTHONPATH=str(ROOT), MYPYPATH=str(ROOT))
    said = [line for line in answer.stdout.splitlines() if ": error" in line or " - error" in line]
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert len(said) == 1, answer.stdout + answer.stderr
    assert re.search(r"wrong\.py.*(Incompatible types|not assignable)", said[0]), answer.stdout


def test_make_refuses_a_python_that_is_too_old(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *sys.exit*) exit 1;; *) echo 3.9;; esac\n')
    old.chmod(0o755)
    answer = run("make", "lint", f"PYTHON={old}", cwd=tmp_path)
    assert answer.returncode == 2
    assert f"amp_plugin needs Python 3.10 or newer, {old} is older or missing" in answer.stderr
    assert not (tmp_path / ".venv").exists()


def test_between_releases_the_version_is_a_development_version() -> None:
    """Otherwise two packages would have the same version, and pip would not install the newer one."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(.+?)\].*\n+(?=(.*))", changelog, re.MULTILINE)
    (unreleased, first_line), (newest, _), *_ = released
    assert unreleased == "Unreleased"
    version, _, development = amp_plugin.__version__.partition(".dev")
    numbers = [[*map(int, name.split("."))] for name in (newest, version)]
    if first_line.startswith("## "):  # nothing has changed since the release
        assert amp_plugin.__version__ == newest
    else:
        assert development.isdigit()
        assert numbers[1] > numbers[0]
