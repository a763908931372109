"""The native core is loaded, or the reason why not is reported. Small sources replace the real ones here."""

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from amp_plugin import log_casts
from amp_plugin.kernels import build, build_cache
from amp_plugin.kernels.build import build_core, core_name, native_core, require_native
from amp_plugin.kernels.build_cache import obtain
from tests.host_device.emulation.emulated_kernels import object_folder, torch_headers
from tests.warm_processes import WarmProcess, call

SOURCES = build.SOURCES
SMALL = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_region", "", -1, methods, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__region() { return PyModule_Create(&definition); }
"""
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
)


def small_sources(folder):
    (folder / "csrc").mkdir()
    (folder / "csrc" / "all_small.cpp").write_text(SMALL)
    return folder / "csrc"


@pytest.fixture(scope="module")
def small_core(tmp_path_factory):
    """Return a core made of small sources for this machine."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", small_sources(folder))
        return build.compile_core(folder, build.vector_widths()[0])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def sources(tmp_path, monkeypatch, cache):
    """Make this process look as if nothing had been loaded, with small sources and its own cache."""
    monkeypatch.setattr(build, "SOURCES", small_sources(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_core", None)
    monkeypatch.delenv("AMP_PLUGIN_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    extension = sys.modules.get("amp_plugin.kernels._region")
    yield build.SOURCES
    sys.modules.pop("amp_plugin.kernels._region", None)
    if extension is not None:
        sys.modules["amp_plugin.kernels._region"] = extension


@pytest.fixture
def no_compiler(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def place(core, folder, width=None):
    """Put a copy of a core into a place where the package looks for one."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / core_name(width or build.vector_widths()[0])
    return obtain(file, lambda scratch: Path(shutil.copy(core, scratch)), rebuild=True)


def load(folder):
    """Load the native core built from ``folder``, and print the result."""
    build.SOURCES = folder
    core = native_core()
    print(core.loaded, core.seconds > 0, core.extension and core.extension.answer(), core.reason)


@needs_compiler
def test_compiled_loaded_and_then_taken_from_the_cache(sources, cache):
    first, second = (call(load, sources, environment={"AMP_PLUGIN_NATIVE": "1"}) for _ in range(2))
    assert first.stdout == "True True 42 \n", first.stderr
    assert first.stderr == "amp_plugin: compiling the native core (once, about a minute) ...\n"
    assert (second.stdout, second.stderr) == ("True False 42 \n", "")
    core, lock = sorted(cache.iterdir())
    assert (core.name, lock.name) == (core_name(build.vector_widths()[0]), f"{core.name}.lock")
    assert core.stat().st_mode & 0o022 == 0


@needs_compiler
def test_threads_share_one_core(sources, capfd):
    with ThreadPoolExecutor(8) as pool:
        cores = list(pool.map(lambda _: native_core(), range(8)))
    assert len({id(core) for core in cores}) == 1
    assert cores[0].extension.answer() == 42
    assert capfd.readouterr().err.count("compiling the native core") == 1


def test_no_compiler_warns_once_and_falls_back(no_compiler, cache, capfd):
    reason = r"there is no C\+\+ compiler on PATH; install g\+\+ 10 or newer, or set CXX"
    with (
        pytest.warns(RuntimeWarning, match=rf"falling back to torch\.autocast .*: {reason}") as caught,
        pytest.raises(RuntimeError, match=rf"^log_casts needs the native core, .*{reason}.*Fix the cause"),
    ):
        log_casts()
    assert [warning.filename for warning in caught] == [__file__]  # the warning points to the user's line
    core = native_core()  # a second warning would be an error
    assert (core.loaded, core.extension, core.library) == (False, None, None)
    assert capfd.readouterr().err == ""


def test_a_warning_made_an_error_is_raised_once(no_compiler):
    with pytest.raises(RuntimeWarning, match="no C"):
        native_core()
    assert not native_core().loaded


@needs_compiler
def test_a_failing_source_names_the_first_error_and_the_log(sources, cache):
    (sources / "all_small.cpp").write_text(
        "int answer() {\n  return unheard_of;\n}\nint other = also_wrong;\n"
    )
    with pytest.warns(
        RuntimeWarning, match=r"all_small\.cpp:2:.*error:.*unheard_of.*\(full log: .*\.log\)$"
    ) as caught:
        assert not native_core().loaded
    log = Path(str(caught[0].message).rpartition("full log: ")[2].rstrip(")")).read_text()
    assert "also_wrong" in log
    assert " ".join(build.compile_flags(build.vector_widths()[0])) in log
    assert not list(cache.glob("*.tmp-*"))


def test_a_compiler_that_writes_nothing_is_named(sources, cache, tmp_path, monkeypatch):
    script = tmp_path / "silent-g++"
    script.write_text("#!/bin/sh\ncase $1 in *version*|-v) echo g++ 13.2.0;; esac\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(RuntimeError, match=r"CXX='.*silent-g\+\+' wrote no core; set CXX to a C\+\+20"):
        build_core()
    assert not list(cache.glob("*.so"))


@needs_compiler
def test_a_core_that_does_not_load_is_not_kept(sources, cache):
    (sources / "all_small.cpp").write_text("int nowhere(); int answer() { return nowhere(); }\n")
    with pytest.warns(RuntimeWarning, match="undefined symbol"):
        assert not native_core().loaded
    assert not list(cache.glob("*.so"))


@needs_compiler
def test_the_compiler_is_the_one_that_cxx_names(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(FileNotFoundError, match="CXX='.*' is not a program on PATH; install g"):
        build_core()
    (tmp_path / "g++").write_text('#!/bin/sh\necho "error: it was called" >&2\nexit 1\n')
    (tmp_path / "g++").chmod(0o755)
    with pytest.raises(RuntimeError, match="error: it was called"):
        build_core()


def test_no_sources(sources):
    (sources / "all_small.cpp").unlink()
    with pytest.raises(FileNotFoundError, match="sources are missing .*; install amp-plugin again"):
        build.compile_core(sources, "AVX2")


@needs_compiler
def test_a_whole_cache_on_a_read_only_file_system_is_used(no_compiler, cache, small_core, monkeypatch):
    file = place(small_core, cache)
    refuse = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    for owner, name in (
        *((os, "chmod"), (os, "replace"), (os, "open")),
        *((build_cache, "FileLock"), (build.tempfile, "TemporaryDirectory")),
    ):
        monkeypatch.setattr(owner, name, refuse)
    assert (native_core().library, native_core().seconds) == (file, 0.0)


@needs_compiler
def test_a_core_that_was_cut_short_is_not_loaded(sources, cache, small_core):
    """Reading past the end of a mapped file kills the process with SIGBUS."""
    file = place(small_core, cache)
    file.write_bytes(file.read_bytes()[:5000])
    broken = call(load, sources, environment={"AMP_PLUGIN_NATIVE": "1", "CXX": "false"})
    assert broken.returncode == 0
    assert broken.stdout.startswith("False False None compiling it failed")
    again = call(load, sources, environment={"AMP_PLUGIN_NATIVE": "1"})
    assert again.stdout == "True True 42 \n"


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_cache_of_root_serves_other_users(sources, cache, small_core, tmp_path):
    place(small_core, cache)
    for folder in (cache, *cache.parents[:-2]):
        folder.chmod(0o755)
    answer = call(load_as_nobody, sources)
    assert answer.stdout == "True False 42 \n", answer.stderr


def load_as_nobody(folder):
    """Load the native core as another user."""
    build.__dict__["SOURCES"] = folder
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    load(folder)


def test_a_cache_of_root_serves_processors_with_wider_vectors(sources, cache, monkeypatch):
    file = place(Path(__file__), cache, "AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert build_core() == (file, 0.0)


@needs_compiler
def test_a_rebuild_compiles_what_is_there(sources, cache):
    place(Path(__file__), cache)
    file, seconds = build_core(rebuild=True)
    assert seconds > 0
    assert file.read_bytes().startswith(b"\x7fELF")


def test_switched_off_in_silence_and_what_is_no_switch(sources, monkeypatch):
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "off")
    with pytest.raises(ValueError, match=r"AMP_PLUGIN_NATIVE='off' is not allowed; use 0 \(fallback\) or 1"):
        native_core()
    monkeypatch.setenv("AMP_PLUGIN_NATIVE", "0")
    assert not native_core().loaded
    with pytest.raises(
        RuntimeError, match=r"needs the native core.*switches it off\. Unset AMP_PLUGIN_NATIVE"
    ):
        require_native("log_casts")


def test_other_systems_fall_back(sources, monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.warns(RuntimeWarning, match="it is built on Linux only, this is darwin"):
        assert not native_core().loaded


def build_slowly(folder, root):
    """Wait until the file ``go`` exists, then fail to build a core from ``folder``."""

    def fail(*_: object):
        with (root / "calls").open("a") as calls:
            calls.write("called\n")
        while not (root / "go").exists():
            time.sleep(0.02)
        msg = "error: broken\n"
        raise RuntimeError(msg)

    build.SOURCES, build.compile_core = folder, fail
    print("asks", file=sys.stderr, flush=True)
    try:
        build_core()
    except RuntimeError as error:
        sys.exit(str(error))


@needs_compiler
def test_processes_that_waited_for_a_failed_build_do_not_repeat_it(sources, tmp_path):
    processes = [WarmProcess(build_slowly, sources, tmp_path) for _ in range(3)]
    deadline = time.monotonic() + 120
    while not all("asks" in process.errors() for process in processes):
        assert time.monotonic() < deadline, [process.errors() for process in processes]
        time.sleep(0.02)
    time.sleep(0.5)  # until both processes wait
    (tmp_path / "go").touch()
    results = [process.wait(120) for process in processes]
    assert [result.returncode for result in results] == [1] * 3
    assert all("compiling it failed: error: broken (full log: " in result.stderr for result in results)
    assert (tmp_path / "calls").read_text() == "called\n"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch, "__version__", "9.9.9"),
        (torch.version, "git_version", "0123abcd"),
        (build.sysconfig, "get_config_var", lambda _: "cpython-399-x86_64-linux-gnu"),
        (build, "compile_flags", lambda _: ["-O0"]),
        (build, "SOURCES", Path(__file__).parent),
    ],
    ids=["release", "commit", "python", "flags", "sources"],
)
def test_another_core_is_needed_for_another(owner, name, value, monkeypatch):
    before = core_name("AVX2")
    assert core_name("AVX512") != before
    monkeypatch.setattr(owner, name, value)
    assert core_name("AVX2") != before


def test_a_build_for_cuda_uses_the_core_of_the_build_for_cpus(monkeypatch):
    names = set()
    for version, cuda in (("2.13.0", "13.0"), ("2.13.0+cpu", None), ("2.13.0+cu126", "12.6")):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        names.add(core_name("AVX2"))
    assert len(names) == 1
    assert names.pop().startswith("core-torch2.13.0-avx2-")


@needs_compiler
def test_the_core_of_a_wheel_needs_no_compiler_and_no_cache(no_compiler, cache, small_core):
    cache.rmdir()
    file = place(small_core, build.PREBUILT)
    assert (native_core().library, native_core().seconds) == (file, 0.0)
    assert native_core().extension is not None
    assert not cache.exists()


def test_the_widest_core_of_a_wheel_that_runs_here_is_taken(sources, monkeypatch):
    for width in build.TARGETS:
        place(Path(__file__), build.PREBUILT, width)
    for capability, taken in (("AVX512", "AVX512"), ("AVX2", "AVX2"), ("AVX512", "AVX2")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert build_core() == (build.PREBUILT / core_name(taken), 0.0)
        if capability == "AVX2":
            (build.PREBUILT / core_name("AVX512")).unlink()


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_a_wheel_gets_a_core_for_each_width_even_one_that_this_cpu_cannot_run(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    files = build.write_cores(tmp_path / "cores")
    assert [file.name for file in files] == [core_name("AVX512"), core_name("AVX2")]
    assert sorted((tmp_path / "cores").iterdir()) == sorted(files)
    assert all(b"PyInit__region" in file.read_bytes() for file in files)


def test_ninja_is_found_where_python_was_called_by_its_path(sources, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setitem(sys.modules, "ninja", types.SimpleNamespace(BIN_DIR="/of/ninja"))
    assert build._environment()["PATH"] == f"{os.environ['PATH']}:/of/ninja"


def test_each_source_is_in_one_unit():
    units = sorted(SOURCES.glob(build.UNITS))
    assert 1 < len(units) < 4
    included = [name for unit in units for name in re.findall(r'#include "(.*)"', unit.read_text())]
    sources = [str(file.relative_to(SOURCES)) for file in SOURCES.rglob("*.cpp") if file not in units]
    assert sorted(included) == sorted(sources)


def check_without_warnings(file, width):
    """Compile a file with every warning as an error. A file that passed before is not compiled again."""
    checked = object_folder() / f"{file.stem}-{core_name(width)}.checked"
    if checked.exists():
        return
    python = f"-isystem{build.sysconfig.get_path('include')}"
    flags = [*build.compile_flags(width), "-O0", "-Werror", "-Wno-psabi", "-fsyntax-only"]
    command = ["c++", *flags, f"-I{SOURCES}", *torch_headers(), python, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    checked.touch()


# these flags exist on x86-64 only
WIDTHS = [*build.TARGETS, "DEFAULT"] if platform.machine() == "x86_64" else []
READ = [
    ("all_dispatch.cpp", None),
    ("all_python.cpp", None),
    *(("all_arithmetic.cpp", width) for width in WIDTHS),
]
WHOLE_RUN = [(str(file.relative_to(SOURCES)), None) for file in sorted(SOURCES.glob("**/*.cpp"))]


@needs_compiler
@pytest.mark.parametrize(
    ("source", "width"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in READ),
        *(pytest.param(*each, marks=pytest.mark.whole_run) for each in WHOLE_RUN if each not in READ),
    ],
)
def test_a_source_compiles_by_itself_and_without_a_warning(source, width):
    check_without_warnings(SOURCES / source, width or build.vector_widths()[0])
