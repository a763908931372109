"""Find the host's C++ compiler and turn sources into one shared object."""

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
from pathlib import Path

_NAMES = ("g++", "c++", "clang++")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"(?:.*/)?([^"/]+)"', re.MULTILINE)
_GCC = re.compile(r"\bg\+\+|\bgcc\b|\(GCC\)|^c\+\+ ", re.IGNORECASE)
_MOST_HEAP = 1 << 30  # bytes
_ERROR = re.compile(r"^.*\b(?:error|undefined reference)\b.*$", re.MULTILINE)
_PACKAGES = {
    "debian": {"compiler": "g++", "Python.h": "python3-dev"},
    "fedora": {"compiler": "gcc-c++", "Python.h": "python3-devel"},
    "rhel": {"compiler": "gcc-c++", "Python.h": "python3-devel"},
    "suse": {"compiler": "gcc-c++", "Python.h": "python3-devel"},
    "arch": {"compiler": "gcc", "Python.h": "python"},
    "alpine": {"compiler": "g++", "Python.h": "python3-dev"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: How it is called, without arguments; more than one word for ``CXX="ccache g++"``.
        version: First line of its ``--version``.
    """

    command: tuple[str, ...]
    version: str

    def memory_flags(self) -> tuple[str, ...]:
        """Return flags that let GCC use more memory before it looks for some to free.

        It starts to look at an eighth of the machine's memory, 128 MB at most, and of torch's headers it
        frees next to nothing: 6 % of the library's time. A unit takes 0.8 GB at most either way.
        """
        if not _GCC.search(self.version):
            return ()
        eighth = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
        return ("--param", f"ggc-min-heapsize={min(eighth, _MOST_HEAP) // 1024}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A translation unit: sources that are compiled together, to one object file.

    Attributes:
        name: What its object file is called.
        sources: One or more C++ files; they share one anonymous namespace.
        flags: For the compiler, besides those of all units.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()

    def file(self, folder: Path) -> Path:
        """Return the file to compile; one that includes all sources is written to ``folder``."""
        if len(self.sources) == 1:
            return self.sources[0]
        joined = folder / f"{self.name}_joined.cpp"
        joined.write_text("".join(f'#include "{source}"\n' for source in self.sources))
        return joined


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedObject:
    """What one shared object is made of.

    Attributes:
        file_name: Name of the result.
        sources: C++ files.
        headers: Our own headers, which the sources include by name.
        include_dirs: Folders with the headers of others.
        compile_flags: For each source; no paths.
        vector_flags: Besides, for a unit with a source that loops over elements; they come last and win.
        vectorized: How the names of such sources begin.
        link_flags: For the linker.
        joined: Compile all sources as one translation unit. Torch's headers are most of the work, and
            are then read once; a change to one source compiles all of them again.
        apart: Of joined sources, those whose names begin with one of a group's words are a translation unit
            of their own.
    """

    file_name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    include_dirs: tuple[Path, ...]
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    joined: bool = False
    apart: tuple[tuple[str, ...], ...] = ()
    vector_flags: tuple[str, ...] = ()
    vectorized: tuple[str, ...] = ()

    def units(self) -> tuple[Unit, ...]:
        """Return the translation units: one or a few of all sources if they are joined, else one each."""
        if not self.joined or len(self.sources) == 1:
            return tuple(self._unit(source.stem, [source]) for source in self.sources)
        name = self.file_name.partition(".")[0]
        grouped = [
            [source for source in self.sources if source.name.startswith(group)] for group in self.apart
        ]
        rest = [source for source in self.sources if not any(source in files for files in grouped)]
        parts = [
            (name, rest),
            *((f"{name}_{words[0]}apart", files) for words, files in zip(self.apart, grouped, strict=True)),
        ]
        return tuple(self._unit(part, files) for part, files in parts if files)

    def _unit(self, name: str, sources: Sequence[Path]) -> Unit:
        computes = any(source.name.startswith(self.vectorized) for source in sources)
        return Unit(name=name, sources=tuple(sources), flags=self.vector_flags if computes else ())


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
    msg = f"there is no C++ compiler on PATH; install the package {package_with('compiler')}"
    raise FileNotFoundError(msg)


def _version(command: tuple[str, ...]) -> str:
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        problem = answer.stderr.strip() or f"exit status {answer.returncode}"
        msg = f"the C++ compiler {shlex.join(command)} does not run ({problem}); set CXX to one that does"
        raise FileNotFoundError(msg)
    return answer.stdout.partition("\n")[0]


def package_with(part: str) -> str:
    """Name this distribution's package that holds the ``"compiler"`` or ``"Python.h"``."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    names = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()
    for name in names:
        if name in _PACKAGES:
            return _PACKAGES[name][part]
    return f"{_PACKAGES['debian'][part]} (or your distribution's equivalent)"


def python_headers() -> Path:
    """Return the folder with this Python's ``Python.h``.

    Raises:
        FileNotFoundError: It is not installed; the text names the package.
    """
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        version, package = platform.python_version(), package_with("Python.h")
        msg = f"Python.h is not in {folder}; install the package {package} for Python {version}"
        raise FileNotFoundError(msg)
    return folder


def included_headers(source: Path, headers: Sequence[Path]) -> list[Path]:
    """Return those of our own headers that a source includes, directly or through another."""
    by_name = {header.name: header for header in headers}
    found: dict[str, Path] = {}
    unread = [source]
    while unread:
        for name in _INCLUDE.findall(unread.pop().read_text()):
            if name in by_name and name not in found:
                found[name] = by_name[name]
                unread.append(by_name[name])
    return sorted(found.values())


def compile_shared_object(
    compiler: Compiler, target: SharedObject, objects: Mapping[Unit, Path], folder: Path
) -> str:
    """Compile what has no object yet; then link.

    Args:
        compiler: The compiler to call.
        target: What to build.
        objects: Translation unit to object file; each appears whole or not at all.
        folder: Where unfinished objects and the result are written.

    Returns:
        The compiler's messages, empty if it had none.

    Raises:
        RuntimeError: A command failed; the text is the command and all it printed.
    """
    messages = compile_objects(compiler, target, objects, folder)
    # Of a function in several units the linker takes the first: that of the units with more flags.
    inputs = [str(objects[unit]) for unit in sorted(target.units(), key=lambda unit: not unit.flags)]
    result = str(folder / target.file_name)
    return messages + _run([*compiler.command, *inputs, *target.link_flags, "-o", result])


def compile_objects(
    compiler: Compiler, target: SharedObject, objects: Mapping[Unit, Path], folder: Path
) -> str:
    """Compile, in parallel, the translation units that have no object; see `compile_shared_object`."""
    own = [f"-I{path}" for path in sorted({str(header.parent) for header in target.headers})]
    others = [f"-isystem{path}" for path in target.include_dirs]

    def compile_unit(unit: Unit) -> str:
        unfinished = folder / objects[unit].name
        file = unit.file(folder)
        flags = [*compiler.memory_flags(), *target.compile_flags, *unit.flags, *own, *others]
        arguments = [*flags, "-c", str(file), "-o", str(unfinished)]
        messages = _run([*compiler.command, *arguments])
        unfinished.replace(objects[unit])
        return messages

    with ThreadPoolExecutor(jobs()) as pool:
        return "".join(
            pool.map(compile_unit, [unit for unit in target.units() if not objects[unit].exists()])
        )


def jobs() -> int:
    """Return how many files may be compiled at once: ``MAX_JOBS``, else one per core."""
    asked = os.environ.get("MAX_JOBS", "")
    return max(1, int(asked)) if asked.isdecimal() else len(os.sched_getaffinity(0))


def _run(command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = answer.stdout + answer.stderr
    if answer.returncode != 0:
        msg = f"{shlex.join(command)}\n{output}\nexit status {answer.returncode}\n"
        raise RuntimeError(msg)
    return output


def first_error(log: str) -> str:
    """Return the first line of a failed command's log that states an error."""
    output = log.partition("\n")[2].strip()  # the first line is the command
    found = _ERROR.search(output)
    return found.group().strip() if found else output.splitlines()[-1]
