"""The native core as a process sees it: loaded, or why not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_plugin import log_casts
from amp_plugin.kernels import build
from amp_plugin.kernels.build import NativeCore, native_core, require_native
from amp_plugin.kernels.compiler import Unit, find_compiler, included_headers, python_headers
from amp_plugin.kernels.torch_flags import Machine, compile_flags, include_dirs, vector_flags
from tests.warm_processes import call

LIBRARY = 'extern "C" int small_answer() { return 42; }\n'
EXTENSION = """
#include <Python.h>
extern "C" int small_answer();
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(small_answer()); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_region", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__region() { return PyModule_Create(&definition); }
"""
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    (folder / "python").mkdir(parents=True)
    (folder / "small.cpp").write_text(LIBRARY)
    (folder / "python" / "region_module.cpp").write_text(EXTENSION)
    return folder


@pytest.fixture
def fresh(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as if nothing was loaded yet, with small sources and a cache of its own."""
    # A process keeps one libamp_plugin.so for good, so an extension here must not need the new one.
    alone = EXTENSION.replace('extern "C" int small_answer();', "static int small_answer() { return 42; }")
    (sources / "python" / "region_module.cpp").write_text(alone)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "_core", None)
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AMP_PLUGIN_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    extension = sys.modules.get("amp_plugin.kernels._region")
    yield
    if extension is not None:
        sys.modules["amp_plugin.kernels._region"] = extension
    else:
        sys.modules.pop("amp_plugin.kernels._region", None)


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def load(sources: Path) -> None:
    """Load the native core made of ``sources`` and print what came of it."""
    build.SOURCES = sources
    core = build.native_core()
    print(core.loaded, core.seconds > 0, core.region and core.region.answer(), core.reason)


def run(sources: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Load the native core made of ``sources`` in a process of its own."""
    return call(load, sources, environment={"AMP_PLUGIN_CACHE_DIR": str(cache), "AMP_PLUGIN_NATIVE": "1"})


@needs_compiler
def test_compiled_loaded_and_then_taken_from_the_cache(sources: Path, tmp_path: Path) -> None:
    first = run(sources, tmp_path / "cache")
    assert first.stdout == "True True 42 \n", first.stderr
    assert [line.partition(" (")[0] for line in first.stderr.splitlines()] == [
        "amp_plugin: compiling libamp_plugin",
        "amp_plugin: compiling _region",
    ]
    second = run(sources, tmp_path / "cache")
    assert (second.stdout, second.stderr) == ("True False 42 \n", "")


@needs_compiler
def test_a_truncated_library_does_not_take_the_process_down(sources: Path, tmp_path: Path) -> None:
    run(sources, tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*/*.so"):
        path.write_bytes(path.read_bytes()[:3000])
    again = run(sources, tmp_path / "cache")
    assert again.returncode == 0
    assert again.stdout == "True True 42 \n", again.stderr


@needs_compiler
def test_threads_share_one_core(fresh: None, capfd: pytest.CaptureFixture[str]) -> None:
    cores: list[NativeCore] = []
    threads = [threading.Thread(target=lambda: cores.append(native_core())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cores) == 8
    assert len({id(core) for core in cores}) == 1
    assert cores[0].loaded
    assert cores[0].region is not None
    assert cores[0].region.answer() == 42
    assert capfd.readouterr().err.count("compiling libamp_plugin") == 1


def test_no_compiler_warns_once_and_falls_back(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with pytest.warns(
        RuntimeWarning, match=r"torch's own autocast .* instead: there is no C\+\+ compiler"
    ) as caught:
        core = native_core()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not core.loaded
    assert core.region is None
    assert core.library is None
    assert core.reason.startswith("there is no C++ compiler on PATH; install the package ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_core() is core
    with pytest.raises(
        RuntimeError,
        match=r"^log_casts needs the native core, .*: there is no C.*Mend the cause and start again",
    ):
        require_native("log_casts")


def test_the_warning_points_at_the_users_line(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with pytest.warns(RuntimeWarning, match="no C") as caught, pytest.raises(RuntimeError, match="log_casts"):
        log_casts()
    assert caught[0].filename == __file__


def test_a_warning_made_an_error_is_raised_once(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no C"):
            native_core()
        assert not native_core().loaded


@needs_compiler
def test_no_python_headers_leaves_the_library(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_plugin.kernels.compiler.sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"Python\.h is not in .*; install the package"):
        core = native_core()
    assert core.loaded
    assert core.region is None
    assert "Python.h" in core.reason
    with pytest.raises(RuntimeError, match=r"log_casts needs the native core.*Python\.h"):
        require_native("log_casts")


@needs_compiler
def test_a_failing_source_falls_back(fresh: None, sources: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (sources / "small.cpp").write_text("int small_answer() { return wrong; }\n")
    with pytest.warns(RuntimeWarning, match=r"small\.cpp:1.*error:.*wrong.*\(full log: .*\.log\)"):
        assert not native_core().loaded
    assert "failed after" in capfd.readouterr().err


@needs_compiler
def test_a_library_that_does_not_load_falls_back(fresh: None, sources: Path) -> None:
    (sources / "small.cpp").write_text('int nowhere(); extern "C" int small_answer() { return nowhere(); }\n')
    with pytest.warns(RuntimeWarning, match="undefined symbol"):
        assert not native_core().loaded


def test_a_cache_folder_others_can_write_is_not_used(fresh: None, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write to the cache folder"):
        assert not native_core().loaded
    assert not list((tmp_path / "cache").iterdir())


def test_switched_off_in_silence(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    core = native_core()
    assert not core.loaded
    assert core.reason == "AMP_PLUGIN_NATIVE=0 switches it off"
    with pytest.raises(
        RuntimeError, match=r"needs the native core.*switches it off\. Unset AMP_PLUGIN_NATIVE"
    ):
        require_native("log_casts")


def test_a_switch_that_is_neither(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "off")
    with pytest.raises(ValueError, match=r"AMP_PLUGIN_NATIVE='off' is not allowed; use 0 \(fallback\) or 1"):
        native_core()


def test_a_choice_of_sources_that_is_neither(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PLUGIN_SEPARATE_SOURCES", "yes")
    with pytest.warns(
        RuntimeWarning, match=r"AMP_PLUGIN_SEPARATE_SOURCES='yes' is not allowed; use 0 .* or 1"
    ):
        assert not native_core().loaded


def test_other_systems_fall_back(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.warns(RuntimeWarning, match="it is built on Linux only, this is darwin"):
        assert not native_core().loaded


def test_the_headers_of_vector_code_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "2")
    monkeypatch.delenv("AMP_PLUGIN_SEPARATE_SOURCES", raising=False)
    library = build.library_target(build.SOURCES, Machine.this())
    rest, arithmetic, *_ = library.units()  # after the rest of the library, before what is for CUDA

    def has_vectors(source: Path) -> bool:
        files = [source, *included_headers(source, library.headers)]
        return any("<ATen/cpu/vec/" in file.read_text() for file in files)

    vectors = {source for source in library.sources if has_vectors(source)}
    assert len(vectors) > 3
    assert vectors <= set(arithmetic.sources)
    assert (rest.flags, arithmetic.flags) == ((), vector_flags())


@pytest.mark.parametrize(
    ("cuda", "cores", "units"),
    [(None, 1, 1), (None, 2, 2), (None, 4, 2), (None, 6, 4), (None, 64, 4), ("13.0", 1, 1), ("13.0", 2, 3)],
)
def test_the_translation_units(
    cuda: str | None, cores: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", str(cores))
    monkeypatch.delenv("AMP_PLUGIN_SEPARATE_SOURCES", raising=False)
    as_if_built_for_cuda(cuda, monkeypatch)
    library = build.library_target(build.SOURCES, Machine.this())
    found = [source for unit in library.units() for source in unit.sources]
    assert len(library.units()) == units
    assert sorted(found) == sorted(library.sources)


def as_if_built_for_cuda(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.torch.version, "cuda", version)
    monkeypatch.setattr(build.torch.version, "hip", None)


def test_what_launches_cuda_kernels_is_compiled_where_torch_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = set(build.SOURCES.glob("*.cpp"))
    for_cuda = set(build.SOURCES.glob("cuda_*.cpp"))
    assert len(for_cuda) > 5
    for version, expected in (("13.0", everything), (None, everything - for_cuda)):
        as_if_built_for_cuda(version, monkeypatch)
        assert set(build.library_target(build.SOURCES, Machine.this()).sources) == expected
    for source in build.source_files(build.SOURCES):
        if not source.name.startswith("cuda_"):
            assert '"cuda_' not in source.read_text(), source


def test_the_extension_does_without_the_headers_of_the_dispatcher() -> None:
    extension = build.region_target(build.SOURCES, Machine.this())
    files = {*extension.sources}.union(
        *(included_headers(source, extension.headers) for source in extension.sources)
    )
    for heavy in ("<ATen/core/dispatch/", "<ATen/record_function.h>", "<torch/"):
        assert [file.name for file in files if heavy in file.read_text()] == []


def test_the_library_does_without_the_headers_of_autograd() -> None:
    library = build.library_target(build.SOURCES, Machine.this())
    assert "autograd_node.cpp" in {source.name for source in library.sources}
    for heavy in ("#include <torch/csrc/autograd/", "<ATen/Context.h>", "<ATen/ops/empty.h>"):
        assert [file.name for file in (*library.sources, *library.headers) if heavy in file.read_text()] == []


def check_without_warnings(sources: list[Path], folder: Path, machine: Machine | None = None) -> None:
    """Let the compiler read ``sources`` as one translation unit, with every warning an error."""
    with_python = [python_headers()] if sources[0].parent.name == "python" else []
    includes = [f"-I{build.SOURCES}", *(f"-isystem{path}" for path in (*include_dirs(), *with_python))]
    joined = Unit(name="all", sources=tuple(sources)).file(folder)
    command = [
        *find_compiler().command,
        *compile_flags(),
        *vector_flags(machine),
        *("-O0", "-Werror", "-Wno-psabi", "-fsyntax-only"),  # vectors are returned by what is inlined only
        *includes,
        str(joined),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("part", [".", "python"])
def test_our_own_sources_compile_without_a_warning(part: str, tmp_path: Path) -> None:
    messages = messages_of_this_build(part)
    if messages is None:
        check_without_warnings(sorted((build.SOURCES / part).glob("*.cpp")), tmp_path)
    else:
        assert "warning:" not in messages


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize(("capability", "architecture"), [("AVX2", "x86-64-v3"), ("DEFAULT", "x86-64-v2")])
def test_the_arithmetic_of_other_machines_compiles(
    capability: str, architecture: str, tmp_path: Path
) -> None:
    arithmetic = [file for file in build.SOURCES.glob("*.cpp") if file.name.startswith(build.ARITHMETIC)]
    check_without_warnings(
        arithmetic, tmp_path, Machine(architecture=architecture, capability=capability, portable=True)
    )


def messages_of_this_build(part: str) -> str | None:
    """What the compiler said in the build in use; None if it was made elsewhere, or source by source."""
    core = native_core()
    extension = core.region and Path(core.region.__file__)
    file = extension if part == "python" else core.library
    log = file and file.parent.with_name(f"{file.parent.name}.log")
    one_by_one = os.environ.get("AMP_PLUGIN_SEPARATE_SOURCES", "0") != "0"
    return None if log is None or one_by_one or not log.exists() else log.read_text()


@needs_compiler
@pytest.mark.whole_run
@pytest.mark.parametrize("source", sorted(build.SOURCES.glob("**/*.cpp")), ids=lambda source: source.name)
def test_each_source_compiles_by_itself(source: Path, tmp_path: Path) -> None:
    check_without_warnings([source], tmp_path)
