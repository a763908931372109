"""A native core that a wheel brings along, made of small sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("hatchling", reason="the wheel's name is hatch_build's")

from amp_plugin.kernels import prebuilt
from amp_plugin.kernels.build import LIBRARY, region_name, source_files
from amp_plugin.kernels.bundle import bundle
from amp_plugin.kernels.prebuilt import MANIFEST, find_prebuilt
from hatch_build import wheel_tag

SMALL_LIBRARY = 'extern "C" int small_answer() { return 42; }\n'
SMALL_EXTENSION = """
#include <Python.h>
extern "C" int small_answer();
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(small_answer()); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_region", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__region() { return PyModule_Create(&definition); }
"""
NAMES = (LIBRARY, region_name())

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or torch.backends.cpu.get_cpu_capability() not in prebuilt.TARGETS,
    reason="needs a C++ compiler and AVX2",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sources, and the folder with a core for AVX2 made of them."""
    folder = tmp_path_factory.mktemp("prebuilt")
    sources = folder / "csrc"
    (sources / "python").mkdir(parents=True)
    (sources / "small.cpp").write_text(SMALL_LIBRARY)
    (sources / "python" / "region_module.cpp").write_text(SMALL_EXTENSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMP_PLUGIN_CACHE_DIR", str(folder / "cache"))
        (core,) = bundle(folder / "cores", sources, ["AVX2"])
    assert core.name == f"torch-{torch.__version__}-avx2"
    return sources, folder / "cores"


@pytest.fixture
def cores(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both, to be changed."""
    sources, folder = made
    return shutil.copytree(sources, tmp_path / "csrc"), shutil.copytree(folder, tmp_path / "cores")


def test_the_core_of_a_wheel_needs_no_compiler_and_no_cache(made: tuple[Path, Path], tmp_path: Path) -> None:
    sources, folder = made
    code = f"""
from pathlib import Path
from amp_plugin.kernels import build
build.SOURCES, build.PREBUILT = Path({str(sources)!r}), Path({str(folder)!r})
core = build.native_core()
print(core.loaded, core.seconds, core.region.answer(), core.library.parent.parent)
"""
    environment = {**os.environ, "PATH": str(tmp_path), "AMP_PLUGIN_CACHE_DIR": str(tmp_path / "cache")}
    environment.update(AMP_PLUGIN_NATIVE="1", CXX="")
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.stdout == f"True 0.0 42 {folder}\n", answer.stderr
    assert not (tmp_path / "cache").exists()


def test_no_path_of_the_building_machine_stays_in_it(made: tuple[Path, Path]) -> None:
    for file in made[1].rglob("*.so"):
        assert str(Path(torch.__file__).parent).encode() not in file.read_bytes()


@pytest.mark.parametrize("changed", ["source", "torch", "cuda", "library", "extension", "manifest", "width"])
def test_a_core_that_does_not_fit_is_passed_over(
    changed: str, cores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, folder = cores
    (core,) = folder.iterdir()
    assert find_prebuilt(source_files(sources), NAMES, folder) == core
    match changed:
        case "source":
            (sources / "small.cpp").write_text(SMALL_LIBRARY + "\n")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9.9")
        case "cuda":  # a torch with CUDA: its library holds what launches kernels
            monkeypatch.setattr(torch.version, "cuda", "13.0")
        case "library":
            (core / LIBRARY).write_bytes((core / LIBRARY).read_bytes()[:-1])
        case "extension":
            (core / region_name()).unlink()
        case "manifest":
            (core / MANIFEST).write_text("{}")
        case "width":
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert find_prebuilt(source_files(sources), NAMES, folder) is None


def test_the_widest_core_that_runs_here_is_taken(
    cores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, folder = cores
    (narrow,) = folder.iterdir()
    wide = shutil.copytree(narrow, folder / "wide")
    manifest = json.loads((wide / MANIFEST).read_text())
    manifest["made for"]["capability"] = "AVX512"
    (wide / MANIFEST).write_text(json.dumps(manifest))
    for capability, expected in (("AVX512", wide), ("AVX2", narrow)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert find_prebuilt(source_files(sources), NAMES, folder) == expected


def test_a_wheel_without_a_core(tmp_path: Path) -> None:
    assert find_prebuilt((), NAMES, tmp_path / "none") is None


def test_the_tag_names_the_newest_c_library_that_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"\0GLIBC_2.17\0GLIBC_2.34\0")
    (tmp_path / "b.so").write_bytes(b"\0GLIBC_2.4\0")
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel_tag(tmp_path) == f"{python}-{python}-manylinux_2_34_x86_64"
    with pytest.raises(FileNotFoundError, match=r"no shared object in .*; run `python -m amp_plugin"):
        wheel_tag(tmp_path / "empty")
