"""Compiling into the cache and reading from it, with small sources of our own."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from amp_plugin.kernels import compiler as compiler_module
from amp_plugin.kernels import shared_object
from amp_plugin.kernels.compiler import (
    Compiler,
    SharedObject,
    find_compiler,
    first_error,
    package_with,
    python_headers,
)
from amp_plugin.kernels.shared_object import obtain
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "other.cpp").write_text('extern "C" int other() { return 7; }\n')
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def target(sources: Path) -> SharedObject:
    return SharedObject(
        file_name="libsmall.so",
        sources=tuple(sorted(sources.glob("*.cpp"))),
        headers=tuple(sources.glob("*.h")),
        include_dirs=(),
        compile_flags=("-fPIC", "-std=c++20"),
        link_flags=("-shared",),
    )


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


def counting_compiler(folder: Path, before: str = "") -> tuple[Path, Path]:
    """A compiler that notes each call that compiles, and runs ``before`` first."""
    calls, script = folder / "calls", folder / "counting-c++"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo "$$" >> {calls}; {before or ":"};; esac\nexec c++ "$@"\n'
    )
    script.chmod(0o755)
    calls.touch()
    return script, calls


def obtain_and_print(sources: Path, root: Path) -> None:
    try:
        print(obtain(target(sources), root).path)
    except RuntimeError as error:
        sys.exit(str(error))


def start(sources: Path, root: Path, **environment: str) -> WarmProcess:
    """Obtain the target in another process; it prints where the result is, or the error."""
    return WarmProcess(obtain_and_print, sources, root, environment=environment)


def test_compiles_once_and_says_so(sources: Path, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = obtain(target(sources), root)
    message = capfd.readouterr().err
    second = obtain(target(sources), root)

    assert answer(first.path) == 42
    assert first.seconds > 0
    assert message.startswith("amp_plugin: compiling libsmall (2 files, once) ... ")
    assert message.endswith(f" {first.seconds:.1f} s\n")
    assert message.count("\n") == 1
    assert second.path == first.path
    assert second.seconds == 0
    assert capfd.readouterr().err == ""


def test_what_is_cached_is_private(sources: Path, root: Path) -> None:
    built = obtain(target(sources), root)
    assert built.path.parent.stat().st_mode & 0o077 == 0
    assert (root / "objects").stat().st_mode & 0o077 == 0


def test_a_changed_source_is_compiled_and_the_others_keep_their_objects(sources: Path, root: Path) -> None:
    old = obtain(target(sources), root)
    objects = {path: path.stat().st_mtime_ns for path in (root / "objects").iterdir()}
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')

    new = obtain(target(sources), root)

    assert answer(new.path) == 43
    assert new.path != old.path
    later = {path: path.stat().st_mtime_ns for path in (root / "objects").iterdir()}
    assert later.keys() > objects.keys()
    assert len(later) == 3
    assert {path: later[path] for path in objects} == objects


@pytest.mark.parametrize("changed", ["answer.h", "number.h"])
def test_a_changed_header_compiles_what_includes_it(changed: str, sources: Path, root: Path) -> None:
    (sources / "answer.h").write_text('#pragma once\n# include "below/number.h"\n#define ANSWER NUMBER\n')
    (sources / "below").mkdir()
    (sources / "below" / "number.h").write_text('#pragma once\n#include "../answer.h"\n#define NUMBER 42\n')
    headers = (sources / "answer.h", sources / "below" / "number.h")
    wanted = dataclasses.replace(target(sources), headers=headers)
    obtain(wanted, root)
    header = next(header for header in headers if header.name == changed)
    header.write_text(header.read_text() + f"#undef {'ANSWER' if changed == 'answer.h' else 'NUMBER'}\n")
    header.write_text(header.read_text() + f"#define {'ANSWER' if changed == 'answer.h' else 'NUMBER'} 44\n")
    assert answer(obtain(wanted, root).path) == 44
    assert len(list((root / "objects").iterdir())) == 3  # other.cpp was not compiled again


def test_joined_sources_are_one_translation_unit(
    sources: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calls = counting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(script))
    joined = dataclasses.replace(target(sources), joined=True)
    first = obtain(joined, root)
    assert answer(first.path) == 42
    assert ctypes.CDLL(str(first.path)).other() == 7
    assert len(calls.read_text().split()) == 1
    (sources / "other.cpp").write_text('extern "C" int other() { return 8; }\n')
    second = obtain(joined, root)
    assert ctypes.CDLL(str(second.path)).other() == 8
    assert len(calls.read_text().split()) == 2


def test_a_group_of_joined_sources_is_a_unit_of_its_own(
    sources: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calls = counting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(script))
    both = dataclasses.replace(target(sources), joined=True, apart=(("other", "more_"), ("none_",)))
    built = obtain(both, root)
    assert (answer(built.path), ctypes.CDLL(str(built.path)).other()) == (42, 7)
    assert len(calls.read_text().split()) == 2


@pytest.mark.parametrize("joined", [False, True])
def test_sources_that_compute_get_more_flags(sources: Path, root: Path, joined: bool) -> None:
    (sources / "other.cpp").write_text('extern "C" int other() { return COMPUTES; }\n')
    wanted = dataclasses.replace(
        target(sources),
        joined=joined,
        apart=(("other",),),
        vector_flags=("-DCOMPUTES=5",),
        vectorized=("other",),
    )
    assert {unit.sources[0].name: unit.flags for unit in wanted.units()}["other.cpp"] == ("-DCOMPUTES=5",)
    assert [unit.flags for unit in wanted.units()].count(()) == len(wanted.units()) - 1
    assert ctypes.CDLL(str(obtain(wanted, root).path)).other() == 5
    changed = dataclasses.replace(wanted, vector_flags=("-DCOMPUTES=6",))
    assert ctypes.CDLL(str(obtain(changed, root).path)).other() == 6


def test_an_error_in_joined_sources_names_the_source(sources: Path, root: Path) -> None:
    (sources / "other.cpp").write_text("\nint other() { return unheard_of; }\n")
    with pytest.raises(RuntimeError, match=r"other\.cpp:2:.*error:.*unheard_of"):
        obtain(dataclasses.replace(target(sources), joined=True), root)


def test_joined_sources_whose_names_clash_are_compiled_by_themselves(
    sources: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("answer", 42), ("other", 7)):
        (sources / f"{name}.cpp").write_text(
            f'static const int number = {number};\nextern "C" int {name}() {{ return number; }}\n'
        )
    built = obtain(dataclasses.replace(target(sources), joined=True), root)
    assert answer(built.path) == 42
    assert "names of two sources clash, each is compiled by itself" in capfd.readouterr().err


@pytest.mark.parametrize(("max_jobs", "compiled"), [("2", 2), ("1", 1)])
def test_the_sources_of_another_are_compiled_at_the_same_time(
    max_jobs: str, compiled: int, sources: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calls = counting_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("MAX_JOBS", max_jobs)
    first = dataclasses.replace(target(sources), sources=(sources / "answer.cpp",))
    second = dataclasses.replace(target(sources), file_name="libsecond.so", sources=(sources / "other.cpp",))
    obtain(first, root, beside=second)
    assert len(calls.read_text().split()) == compiled
    assert ctypes.CDLL(str(obtain(second, root).path)).other() == 7
    assert len(calls.read_text().split()) == 2


def test_what_fails_beside_fails_where_it_is_obtained(sources: Path, root: Path) -> None:
    (sources / "other.cpp").write_text("int other() { return unheard_of; }\n")
    first = dataclasses.replace(target(sources), sources=(sources / "answer.cpp",))
    second = dataclasses.replace(target(sources), file_name="libsecond.so", sources=(sources / "other.cpp",))
    assert answer(obtain(first, root, beside=second).path) == 42
    with pytest.raises(RuntimeError, match=r"other\.cpp:1:.*unheard_of"):
        obtain(second, root)


def test_rebuild_compiles_what_is_whole(sources: Path, root: Path) -> None:
    obtain(target(sources), root)
    assert obtain(target(sources), root, rebuild=True).seconds > 0


@pytest.mark.parametrize(
    ("version", "is_gcc"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        ("c++ (GCC) 14.2.1 20250110 (Red Hat 14.2.1-7)", True),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", True),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", False),
        ("Intel(R) oneAPI DPC++/C++ Compiler 2025.0.4", False),
    ],
)
def test_only_gcc_is_told_how_much_memory_it_may_use(version, is_gcc):
    flags = Compiler(command=("c++",), version=version).memory_flags()
    assert bool(flags) == is_gcc
    if is_gcc:
        name, _, kilobytes = flags[1].partition("=")
        assert (flags[0], name) == ("--param", "ggc-min-heapsize")
        assert 0 < int(kilobytes) <= 1 << 20


@pytest.mark.parametrize("what", ["torch version", "torch commit", "cpu", "flags", "compiler", "python"])
def test_the_cache_key_holds(
    what: str, sources: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = target(sources)
    first = obtain(wanted, root)
    match what:
        case "torch version":
            monkeypatch.setattr(torch, "__version__", "9.9.9")
        case "torch commit":
            monkeypatch.setattr(torch.version, "git_version", "0123abcd")
        case "cpu":
            monkeypatch.setattr(shared_object, "cpu_identity", lambda: "flags: other")
        case "flags":
            wanted = dataclasses.replace(
                wanted, compile_flags=(*wanted.compile_flags, "-D_GLIBCXX_USE_CXX11_ABI=0")
            )
        case "compiler":
            monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)[0]))
        case "python":
            wanted = dataclasses.replace(wanted, file_name="libsmall.cpython-399-x86_64-linux-gnu.so")
    second = obtain(wanted, root)
    assert second.seconds > 0
    assert second.path.parent != first.path.parent


def test_paths_of_torch_are_not_part_of_the_key(sources: Path, root: Path) -> None:
    wanted = target(sources)
    obtain(wanted, root)
    elsewhere = dataclasses.replace(
        wanted, link_flags=(*wanted.link_flags, "-L/elsewhere", "-Wl,-rpath,/elsewhere")
    )
    assert obtain(elsewhere, root).seconds == 0


@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "no manifest", "bad manifest", "flipped"])
def test_a_damaged_entry_is_rebuilt(damage: str, sources: Path, root: Path) -> None:
    path = obtain(target(sources), root).path
    content = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "no manifest":
            (path.parent / "manifest.json").unlink()
        case "bad manifest":
            (path.parent / "manifest.json").write_text("[]")
        case "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    again = obtain(target(sources), root)

    assert again.seconds > 0
    assert again.path.read_bytes() == content
    assert answer(again.path) == 42


def test_a_damaged_object_is_compiled_again(sources: Path, root: Path) -> None:
    first = obtain(target(sources), root)
    for file in (root / "objects").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    shutil.rmtree(first.path.parent)
    assert answer(obtain(target(sources), root).path) == 42


def test_a_failed_compile_names_the_first_error_and_the_log(
    sources: Path, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (sources / "answer.cpp").write_text("int answer() {\n  return unheard_of;\n}\nint second = also_wrong;\n")
    with pytest.raises(
        RuntimeError, match=r"answer\.cpp:2:.*error:.*unheard_of.*\(full log: .*\.log\)$"
    ) as caught:
        obtain(target(sources), root)
    log = Path(str(caught.value).rpartition("full log: ")[2].rstrip(")")).read_text()
    assert log.startswith(" ".join(find_compiler().command))
    assert "also_wrong" in log
    assert " failed after " in capfd.readouterr().err
    assert not list(root.glob("*.tmp-*"))

    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    assert answer(obtain(target(sources), root).path) == 42


def test_a_failed_link_names_the_symbol(sources: Path, root: Path) -> None:
    (sources / "answer.cpp").write_text('int nowhere(); extern "C" int answer() { return nowhere(); }\n')
    strict = dataclasses.replace(target(sources), link_flags=("-shared", "-Wl,-z,defs"))
    with pytest.raises(RuntimeError, match=r"undefined.*nowhere"):
        obtain(strict, root)


def test_no_source(tmp_path: Path, root: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"sources of libsmall\.so are missing .* install amp-plugin again"
    ):
        obtain(target(tmp_path / "empty"), root)


def test_without_a_compiler(
    sources: Path, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        compiler_module.platform, "freedesktop_os_release", lambda: {"ID": "ubuntu", "ID_LIKE": "debian"}
    )
    with pytest.raises(FileNotFoundError, match=r"no C\+\+ compiler on PATH; install the package g\+\+$"):
        obtain(target(sources), root)


def test_an_image_built_ahead_of_time_needs_no_compiler(
    sources: Path, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = obtain(target(sources), root)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obtain(target(sources), root) == dataclasses.replace(built, seconds=0.0)
    built.path.write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError, match="no C"):
        obtain(target(sources), root)


def test_cxx_is_honoured(sources: Path, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, calls = counting_compiler(tmp_path)
    monkeypatch.setenv("CXX", f"env UNUSED=1 {script}")
    assert answer(obtain(target(sources), root).path) == 42
    assert len(calls.read_text().split()) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "no-such-compiler -O9",
            r"CXX='no-such-compiler -O9' is no program on PATH; set CXX to a C\+\+20 compiler",
        ),
        ("false", r"the C\+\+ compiler false does not run \(exit status 1\); set CXX to one that does"),
    ],
)
def test_a_bad_cxx(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(FileNotFoundError, match=message):
        find_compiler()


def test_of_several_processes_one_compiles(sources: Path, root: Path, tmp_path: Path) -> None:
    script, calls = counting_compiler(tmp_path, before="sleep 1")
    processes = [start(sources, root, CXX=str(script)) for _ in range(4)]
    results = [process.wait(120) for process in processes]
    assert [result.returncode for result in results] == [0] * 4, results
    assert len({result.stdout for result in results}) == 1
    assert len(calls.read_text().split()) == 2  # two sources, each once
    assert sum("compiling libsmall" in result.stderr for result in results) == 1


def test_processes_that_waited_for_a_failed_build_do_not_repeat_it(
    sources: Path, root: Path, tmp_path: Path
) -> None:
    (sources / "other.cpp").unlink()
    script, calls = counting_compiler(tmp_path, before="while [ ! -e go ]; do sleep 0.1; done; exit 3")
    script.write_text(script.read_text().replace("-e go", f"-e {tmp_path}/go"))
    processes = [start(sources, root, CXX=str(script)) for _ in range(3)]
    waiting = [process for process in processes if "waiting" in _first_words(process)]
    (tmp_path / "go").touch()
    results = [process.wait(120) for process in processes]
    assert len(waiting) == 2
    assert [result.returncode for result in results] == [1] * 3
    assert len(calls.read_text().split()) == 1


def _first_words(process: WarmProcess) -> str:
    """Wait until standard error tells who compiles."""
    deadline = time.monotonic() + 60
    while not any(word in process.errors() for word in ("waiting", "compiling")):
        assert time.monotonic() < deadline, process.errors()
        time.sleep(0.01)
    return process.errors()


def test_a_killed_build_leaves_nothing_that_is_used(sources: Path, root: Path, tmp_path: Path) -> None:
    script, calls = counting_compiler(tmp_path, before="sleep 600 & echo $! >> sleepers; wait")
    script.write_text(script.read_text().replace(">> sleepers", f">> {tmp_path}/sleepers"))
    process = start(sources, root, CXX=str(script))
    deadline = time.monotonic() + 60
    while not calls.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(root.glob("*.tmp-*"))
    process.kill()
    for pid in [*calls.read_text().split(), *(tmp_path / "sleepers").read_text().split()]:
        os.kill(int(pid), signal.SIGKILL)  # the compiler outlives us

    script.write_text(counting_compiler(tmp_path)[0].read_text())
    again = start(sources, root, CXX=str(script))
    done = again.wait(60)

    assert done.returncode == 0, done.stderr
    assert answer(Path(done.stdout.strip())) == 42
    assert not list(root.glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("g++ -c a\na.cpp:1: warning: w\na.cpp:3:5: error: 'x' was not declared\nmore\n", "a.cpp:3:5: error: 'x' was not declared"),
        ("g++ a\na.cpp:9:10: fatal error: ATen/ATen.h: No such file\n", "a.cpp:9:10: fatal error: ATen/ATen.h: No such file"),
        ("ld\nld: a.o: in function `f':\na.cpp:(.text+0x1): undefined reference to `g()'\n", "a.cpp:(.text+0x1): undefined reference to `g()'"),
        ("g++ error.cpp\ng++: killed by signal 9\n\nexit status 1\n", "exit status 1"),
    ],
)  # fmt: skip
def test_first_error(log: str, expected: str) -> None:
    assert first_error(log) == expected


@pytest.mark.parametrize(
    ("release", "compiler", "headers"),
    [
        ({"ID": "debian"}, "g++", "python3-dev"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "gcc-c++", "python3-devel"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "gcc-c++", "python3-devel"),
        ({"ID": "unheard"}, "g++ (or your distribution's equivalent)", "python3-dev (or your distribution's equivalent)"),
    ],
)  # fmt: skip
def test_the_package_of_this_distribution(
    release: dict[str, str], compiler: str, headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module.platform, "freedesktop_os_release", lambda: release)
    assert package_with("compiler") == compiler
    assert package_with("Python.h") == headers


def test_missing_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(compiler_module.platform, "freedesktop_os_release", lambda: {"ID": "debian"})
    with pytest.raises(
        FileNotFoundError, match=rf"Python\.h is not in {tmp_path}; install the package python3-dev"
    ):
        python_headers()
