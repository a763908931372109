"""Find the host's C++ compiler and turn sources into one shared object.

Flags follow the installed torch: its headers, its C++ ABI, its OpenMP library.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_NAMES = ("g++", "c++", "clang++")
_ERROR = re.compile(r"^.*\b(?:error|undefined reference)\b.*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: How it is called, without arguments; more than one word for ``CXX="ccache g++"``.
        version: First line of its ``--version``.
    """

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedObject:
    """What one shared object is made of.

    Attributes:
        file_name: Name of the result.
        sources: C++ files, each compiled to an object of its own.
        headers: Files the sources may include; they count towards the cache key.
        compile_flags: For each source, without the paths of `include_dirs`.
        include_dirs: Folders with headers; their place is not part of the cache key.
        link_flags: For the linker.
    """

    file_name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    compile_flags: tuple[str, ...]
    include_dirs: tuple[Path, ...]
    link_flags: tuple[str, ...]


def find_compiler() -> Compiler:
    """Return the compiler that ``CXX`` names, else the first of g++, c++ and clang++.

    Raises:
        FileNotFoundError: There is none; the text names the package to install.
    """
    if wanted := os.environ.get("CXX"):
        command = tuple(shlex.split(wanted))
        if not command or shutil.which(command[0]) is None:
            msg = f"CXX={wanted!r} is no program on PATH; set CXX to a C++20 compiler or unset it"
            raise FileNotFoundError(msg)
        return Compiler(command=command, version=_version(command))
    for name in _NAMES:
        if path := shutil.which(name):
            return Compiler(command=(path,), version=_version((path,)))
    msg = f"there is no C++ compiler on PATH; install the package {package_of('compiler')}"
    raise FileNotFoundError(msg)


def _version(command: tuple[str, ...]) -> str:
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        msg = f"the C++ compiler {shlex.join(command)} does not run: {answer.stderr.strip() or answer.returncode}"
        raise FileNotFoundError(msg)
    return answer.stdout.partition("\n")[0]


def package_of(part: str) -> str:
    """Name the distribution's package that holds the ``"compiler"`` or Python's ``"headers"``."""
    packages = {
        "debian": {"compiler": "g++", "headers": "python3-dev"},
        "fedora": {"compiler": "gcc-c++", "headers": "python3-devel"},
        "suse": {"compiler": "gcc-c++", "headers": "python3-devel"},
        "arch": {"compiler": "gcc", "headers": "python"},
        "alpine": {"compiler": "g++", "headers": "python3-dev"},
    }
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    families = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".replace("opensuse", "suse").split()
    for family in ("fedora" if name in {"rhel", "centos"} else name for name in families):
        if family in packages:
            return packages[family][part]
    return packages["debian"][part] + " (or your distribution's equivalent)"


def python_headers() -> Path:
    """Return the folder with this Python's ``Python.h``.

    Raises:
        FileNotFoundError: It is not installed; the text names the package.
    """
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        version = ".".join(platform.python_version_tuple()[:2])
        msg = f"Python {version}'s header Python.h is not in {folder}; install the package {package_of('headers')}"
        raise FileNotFoundError(msg)
    return folder


@cache
def cpu_identity() -> str:
    """Return the CPU's model and instruction sets: what ``-march=native`` depends on."""
    wanted = {"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part", "isa"}
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    pairs = (line.partition(":") for line in first_core.splitlines())
    return "\n".join(f"{name.strip()}:{value}" for name, _, value in pairs if name.strip() in wanted)


def torch_include_dirs() -> tuple[Path, ...]:
    """Return the folders of torch's C++ headers."""
    include = Path(torch.__file__).parent / "include"
    return (include, include / "torch" / "csrc" / "api" / "include")


def torch_compile_flags() -> tuple[str, ...]:
    """Return the flags that make code fit this torch and this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = (f"-DCPU_CAPABILITY_{capability}",) if capability in {"AVX2", "AVX512"} else ()
    return (
        *("-O3", "-std=c++20", "-march=native", "-fPIC", "-fopenmp", "-DNDEBUG", "-Wall", "-Wextra"),
        *("-fno-math-errno", "-fno-trapping-math"),  # as torch itself is compiled
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *vectors,
    )


def torch_link_flags() -> tuple[str, ...]:
    """Return the linker's flags: torch's libraries and the OpenMP library torch brings."""
    package = Path(torch.__file__).parent
    libraries = package / "lib"
    bundled = sorted([*libraries.glob("libgomp*.so*"), *(package.parent / "torch.libs").glob("libgomp*.so*")])
    openmp = str(bundled[0]) if bundled else "-fopenmp"  # a second OpenMP would start a second set of threads
    return ("-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", openmp)


def compile_shared_object(
    compiler: Compiler, target: SharedObject, objects: Mapping[Path, Path], folder: Path
) -> str:
    """Compile what has no object yet, in parallel, then link.

    Args:
        compiler: The compiler to call.
        target: What to build.
        objects: Source to object file; objects that exist are used as they are.
        folder: Where the result is written; also holds objects while they are unfinished.

    Returns:
        The compiler's messages, empty if it had none.

    Raises:
        RuntimeError: A command failed; the text is all it printed.
    """
    includes = [f"-isystem{path}" for path in target.include_dirs]
    missing = [source for source in target.sources if not objects[source].exists()]

    def compile_one(source: Path) -> str:
        unfinished = folder / objects[source].name
        command = [
            *compiler.command,
            *target.compile_flags,
            *includes,
            "-c",
            str(source),
            "-o",
            str(unfinished),
        ]
        messages = _run(command)
        unfinished.replace(objects[source])
        return messages

    with ThreadPoolExecutor(_jobs()) as pool:
        messages = list(pool.map(compile_one, missing))
    linked = [str(objects[source]) for source in target.sources]
    messages.append(
        _run([*compiler.command, *linked, *target.link_flags, "-o", str(folder / target.file_name)])
    )
    return "".join(messages)


def _jobs() -> int:
    asked = os.environ.get("MAX_JOBS", "")
    return max(1, int(asked)) if asked.isdecimal() else len(os.sched_getaffinity(0))


def _run(command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = answer.stdout + answer.stderr
    if answer.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{output}\nexit status {answer.returncode}\n")
    return output


def first_error(log: str) -> str:
    """Return the first line of a compiler's output that states an error."""
    output = log.partition("\n")[2]  # the first line is the command
    found = _ERROR.search(output)
    return found.group().strip() if found else (output.strip().splitlines() or ["no message"])[-1]
