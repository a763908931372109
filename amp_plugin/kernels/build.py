"""Compiles the native core (the C++ part of amp_plugin) once per torch release, and loads it.

A core that was installed with a wheel takes precedence over a core in the build cache. The build cache also
contains the cubins of the CUDA kernels. docs/decisions/building_the_core.md explains the guarantees of the
cache, and why a child process compiles the core.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from amp_plugin.kernels.build_cache import cache_root, digest, is_cached, obtain
from amp_plugin.messages import warn_user

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
UNITS: Final = "all_*.cpp"
"""The files to compile.

Each of them includes several sources, so that the compiler reads torch's headers once.
"""
TARGETS: Final = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
"""Maps a result of ``torch.backends.cpu.get_cpu_capability()`` to the compiler option ``-march``."""
_EXTENSION: Final = "_region"
_COMPILE: Final = "import json, sys; from torch.utils.cpp_extension import load; load(**json.load(sys.stdin))"
_FIRST_ERROR = re.compile(r"^.*\b(?:error|undefined (?:reference|symbol))\b.*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeCore:
    """The loaded native core, or the reason why it is not loaded.

    Attributes:
        reason: Why the core is not loaded, in one sentence. It is empty if the core is loaded.
        library: The file from which the core was loaded, or None.
        extension: The pybind11 module with the core's classes and functions, or None if the core is not
            loaded.
        seconds: The compile time in seconds, or 0.0 if the core had been compiled before.
    """

    reason: str = ""
    library: Path | None = None
    extension: ModuleType | None = None
    seconds: float = 0.0

    @property
    def loaded(self) -> bool:
        """Whether the core is loaded and its ops are registered."""
        return self.extension is not None


_core: NativeCore | None = None
_lock = threading.Lock()


def native_core() -> NativeCore:
    """Return the native core. The first call compiles and loads it.

    Several threads and processes may call this function at the same time. If the core cannot be loaded, no
    error is raised, but one RuntimeWarning is issued. ``loaded`` is then False, and ``reason`` says why.

    Returns:
        The native core. Every call returns the same object.

    Example:
        >>> from amp_plugin.kernels.build import native_core
        >>> core = native_core()
        >>> core.loaded or bool(core.reason)
        True
    """
    global _core  # noqa: PLW0603 -- once per process
    if _core is None:
        with _lock:
            if _core is None:
                _core = _load()
                if not _core.loaded and not _switched_off():
                    text = "amp_plugin's native core is not loaded; falling back to torch.autocast and plain "
                    warn_user(f"{text}torch ops: {_core.reason}", RuntimeWarning)
    return _core


def require_native(feature: str) -> NativeCore:
    """Return the native core, or raise RuntimeError if it is not loaded.

    The error message gives the reason, and names the ``feature`` that needs the native C++ core.
    """
    core = native_core()
    if not core.loaded:
        way_out = "Fix the cause and start again; `amp-plugin doctor` shows the state of this machine."
        if _switched_off():
            way_out = "Unset AMP_PLUGIN_NATIVE and start again."
        msg = f"{feature} needs the native core, which is not loaded: {core.reason}. {way_out}"
        raise RuntimeError(msg)
    return core


def _switched_off() -> bool:
    value = os.environ.get("AMP_PLUGIN_NATIVE", "1")
    if value not in {"0", "1"}:
        msg = f"AMP_PLUGIN_NATIVE={value!r} is not allowed; use 0 (fallback) or 1 (native core, the default)"
        raise ValueError(msg)
    return value == "0"


def _load() -> NativeCore:
    if _switched_off():
        return NativeCore(reason="AMP_PLUGIN_NATIVE=0 switches it off")
    if sys.platform != "linux":
        return NativeCore(reason=f"it is built on Linux only, this is {sys.platform}")
    try:
        file, seconds = build_core()
        name = f"{__package__}.{_EXTENSION}"
        spec = importlib.util.spec_from_file_location(name, file)
        # The spec of an .so file is never None.
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        return NativeCore(reason=str(error))
    sys.modules[name] = module
    return NativeCore(library=file, extension=module, seconds=seconds)


def _forget_lock() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def build_core(*, rebuild: bool = False) -> tuple[Path, float]:
    """Find or compile the native core. Return the core's file and the compile time in seconds.

    Raises:
        RuntimeError: the compilation failed. The message contains the first error and the path of the log.
        OSError: there is no C++ compiler, or the cache folder cannot be used.
    """
    widths = vector_widths()
    for file in () if rebuild else (PREBUILT / core_name(width) for width in widths):
        if file.is_file():
            return file, 0.0
    cache = cache_root()
    # A read-only cache may have been filled on a CPU with narrower vectors.
    # The native core in that cache is used even if this CPU supports wider vectors.
    if not rebuild and not os.access(cache, os.W_OK):
        for file in (cache / core_name(width) for width in widths):
            if is_cached(file):
                return file, 0.0
    file, seconds = cache / core_name(widths[0]), 0.0
    log, asked = file.with_name(file.name + ".log"), time.time()

    def make(folder: Path) -> Path:
        nonlocal seconds
        if log.exists() and log.stat().st_mtime >= asked:  # another process has just failed
            raise RuntimeError(_failure(log))
        _compiler()  # raises early if there is no compiler
        started = time.perf_counter()
        print("amp_plugin: compiling the native core (once, about a minute) ...", file=sys.stderr, flush=True)
        try:
            made = compile_core(folder, widths[0])
        except RuntimeError as error:
            log.write_text(str(error))
            raise RuntimeError(_failure(log)) from error
        seconds = time.perf_counter() - started
        return made

    return obtain(file, make, rebuild=rebuild), seconds


def vector_widths() -> tuple[str, ...]:
    """Return torch's names for the vector widths of this CPU, widest first."""
    widest, known = torch.backends.cpu.get_cpu_capability(), tuple(TARGETS)
    return known[known.index(widest) :] if widest in known else (widest,)


def core_name(width: str) -> str:
    """Return the file name of a compiled C++ core.

    The name contains torch's release, the vector width, and a hash of the sources and of other build inputs.
    """
    release = torch.__version__.partition("+")[0]  # CPU and CUDA builds share a core
    files = [*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]
    sources = {file.name: file.read_text() for file in files}
    parts = {**sources, "commit": str(torch.version.git_version), "flags": " ".join(compile_flags(width))}
    parts["python"] = str(sysconfig.get_config_var("SOABI"))  # Python's release and CPU type
    return f"core-torch{release}-{width.replace(' ', '_').lower()}-{digest(parts)}.so"


def compile_flags(width: str) -> list[str]:
    """Return the compiler flags for a vector width, to be added to torch's own. OpenMP is not linked."""
    vectors = [f"-march={TARGETS[width]}", f"-DCPU_CAPABILITY_{width}"] if width in TARGETS else []
    as_in_torch = ["-O3", "-DNDEBUG", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    # The compiler must not fuse multiply-adds, so that all vector widths give the same bits.
    same_bits = "-ffp-contract=off"
    lean_headers = "-DAT_PER_OPERATOR_HEADERS"  # else autograd's headers include all ops
    standard = "-std=c++20"  # torch 2.11 defaults to C++17
    return [standard, *as_in_torch, same_bits, lean_headers, "-fvisibility=hidden", *vectors]


def compile_core(folder: Path, width: str) -> Path:
    """Compile the C++ core into an empty folder, in a child process.

    If this CPU can run the compiled library, the child process also loads it. If the child process fails,
    raise a RuntimeError with its complete output.
    """
    units = sorted(str(file) for file in SOURCES.glob(UNITS))
    if not units:
        msg = "the C++ sources are missing from the installed package; install amp-plugin again"
        raise FileNotFoundError(msg)
    wanted: dict[str, object] = {
        "name": _EXTENSION,
        "sources": units,
        "extra_cflags": compile_flags(width),
        "extra_include_paths": [str(SOURCES)],
        "build_directory": str(folder),
    }
    runs_here = width in vector_widths()
    # torch's load() imports the library that it compiled, unless ``is_standalone`` is True.
    if not runs_here:
        wanted |= {"is_standalone": True, "is_python_module": False}
        wanted["extra_ldflags"] = ["-shared", "-ltorch_python"]
    answer = subprocess.run(  # noqa: S603 -- this Python
        [sys.executable, "-c", _COMPILE],
        input=json.dumps(wanted),
        env=_environment(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    made = folder / (f"{_EXTENSION}.so" if runs_here else _EXTENSION)
    if answer.returncode != 0 or not made.is_file():
        said = answer.stderr
        if not said or f"{made}: cannot open" in said:  # no error message from the compiler
            said += f"\nerror: CXX={_compiler()!r} wrote no core; set CXX to a C++20 compiler, or unset it"
        raise RuntimeError(said)
    return made


def _environment() -> dict[str, str]:
    """Return the environment variables for the compiler process. The variables hide all GPUs."""
    folders = [os.environ.get("PATH", os.defpath)]
    with suppress(ImportError):  # ninja may be missing from PATH
        folders.append(importlib.import_module("ninja").BIN_DIR)
    return {
        **os.environ,
        "CXX": _compiler(),
        "PATH": os.pathsep.join(folders),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        if shutil.which(name.partition(" ")[0]):
            return name
    msg = f"CXX={asked!r} is not a program on PATH" if asked else "there is no C++ compiler on PATH"
    msg = f"{msg}; install g++ 10 or newer, or set CXX to a C++20 compiler"
    raise FileNotFoundError(msg)


def _failure(log: Path) -> str:
    text = log.read_text().strip()
    found = _FIRST_ERROR.search(text)
    first = found.group().strip() if found else text.splitlines()[-1]
    return f"compiling it failed: {first} (full log: {log})"


def write_cores(folder: Path) -> list[Path]:
    """Compile the native C++ cores that go into a wheel, for the installed torch and Python.

    `make wheels` calls this function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / core_name(width) for width in TARGETS]
    for width, file in zip(TARGETS, files, strict=True):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compile_core(Path(scratch), width).replace(file)
    return files
