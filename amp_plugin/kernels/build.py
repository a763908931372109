"""Compile the native core once per torch version and machine, load it, or say why not.

Two shared objects: ``libamp_plugin.so`` from ``csrc/*.cpp`` (kernels and dispatcher
functors; they register themselves when loaded) and the Python extension ``_region``
from ``csrc/python/*.cpp``. Both are compiled at first use by the host's compiler and
kept in the build cache, one process compiling while the others wait.

Environment:
    AMP_PLUGIN_NATIVE: ``0`` forces the fallback, silently.
    AMP_PLUGIN_CACHE_DIR: The cache folder (default ``$XDG_CACHE_HOME/amp_plugin``).
    CXX: The C++ compiler.
    MAX_JOBS: How many files are compiled at once (default: one per core).
    AMP_PLUGIN_SEPARATE_SOURCES: ``1`` compiles each source by itself: a first build takes three times
        as long, one after a change to one source half as long.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from amp_plugin.kernels.build_cache import cache_root
from amp_plugin.kernels.compiler import SharedObject, jobs, python_headers
from amp_plugin.kernels.prebuilt import FOLDER, find_prebuilt
from amp_plugin.kernels.shared_object import Built, obtain
from amp_plugin.kernels.torch_flags import Machine, compile_flags, include_dirs, link_flags, vector_flags
from amp_plugin.user_warnings import warn_user

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = FOLDER
LIBRARY = "libamp_plugin.so"
REGION = "_region"
ARITHMETIC = ("scaling_", "step_", "weight_")
"""How the names of the sources begin that compute on elements: half of the compiler's work."""
FOR_CUDA = "cuda_"
"""How the names of the sources begin that a torch without CUDA does not need."""
MANY_CORES = 6
"""From so many on, each word of `ARITHMETIC` is a translation unit, and the rest of the library another."""
_FAILURES = (OSError, RuntimeError, ValueError, ImportError)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeCore:
    """What is loaded of the native core.

    Attributes:
        loaded: True if ``libamp_plugin.so`` is loaded, so its ops and functors are registered.
        reason: Why something is missing, in one sentence; empty if all is there.
        library: The library's path; None if it is not loaded.
        region: The Python extension ``_region``; None if it is not loaded, which can also
            happen with ``loaded`` True (no Python.h).
        seconds: Time spent compiling; 0.0 if all came from the cache.
    """

    loaded: bool
    reason: str
    library: Path | None
    region: ModuleType | None
    seconds: float


_core: NativeCore | None = None
_lock = threading.Lock()


def native_core() -> NativeCore:
    """Return the native core, compiled and loaded at the first call.

    Safe to call from several threads and processes. Never raises because something is
    missing: then ``loaded`` is False (or ``region`` is None), ``reason`` says why, and one
    RuntimeWarning has said so.

    Returns:
        The same object at every call of a process.

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
                core, warn = _load()
                _core = core
                if warn:
                    warn_user(_fallback_text(core), RuntimeWarning)
    return _core


def require_native(feature: str) -> NativeCore:
    """Return the native core for a feature that has no fallback.

    Args:
        feature: What needs it, as the user knows it, such as ``"log_casts"``.

    Raises:
        RuntimeError: Part of the native core is missing; says why and what to do.
    """
    core = native_core()
    if not core.loaded or core.region is None:
        msg = f"{feature} needs the native core, which is not loaded: {core.reason}. {_way_out()}"
        raise RuntimeError(msg)
    return core


def _way_out() -> str:
    if _switched_off():
        return "Unset AMP_PLUGIN_NATIVE and start again."
    return "Mend the cause and start again; `amp-plugin doctor` shows the state of this machine."


def _fallback_text(core: NativeCore) -> str:
    instead = "torch's own autocast" if core.loaded else "torch's own autocast and plain torch ops"
    return f"amp_plugin's native core is not complete, {instead} will do instead: {core.reason}"


def _switched_off() -> bool:
    value = os.environ.get("AMP_PLUGIN_NATIVE", "1")
    if value not in {"0", "1"}:
        msg = f"AMP_PLUGIN_NATIVE={value!r} is not allowed; use 0 (fallback) or 1 (native core, the default)"
        raise ValueError(msg)
    return value == "0"


def _load() -> tuple[NativeCore, bool]:
    """Build and load both parts; returns the core and whether to warn."""
    if _switched_off():
        return _missing("AMP_PLUGIN_NATIVE=0 switches it off"), False
    if sys.platform != "linux":
        return _missing(f"it is built on Linux only, this is {sys.platform}"), True
    try:
        library = build_library(SOURCES)
        torch.ops.load_library(str(library.path))  # type: ignore[no-untyped-call]
    except _FAILURES as error:
        return _missing(_reason_of(error)), True
    seconds, region, reason = library.seconds, None, ""
    try:
        extension = build_region(library, SOURCES)
        seconds += extension.seconds
        region = _import_extension(extension.path)
    except _FAILURES as error:
        reason = _reason_of(error)
    core = NativeCore(loaded=True, reason=reason, library=library.path, region=region, seconds=seconds)
    return core, region is None


def _reason_of(error: Exception) -> str:
    """Return an error's text; torch keeps the linker's word in the cause."""
    return f"{error} ({error.__cause__})" if isinstance(error.__cause__, OSError) else str(error)


def _missing(reason: str) -> NativeCore:
    return NativeCore(loaded=False, reason=reason, library=None, region=None, seconds=0.0)


def _forget_lock() -> None:
    """Give a forked child a fresh lock: the thread that held it was not forked."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def build_library(sources: Path, *, rebuild: bool = False) -> Built:
    """Return ``libamp_plugin.so``, from the cache or compiled.

    Args:
        sources: Folder whose ``*.cpp`` are compiled.
        rebuild: Compile even if the cache has it.

    Raises:
        RuntimeError: Compilation failed; names the first error and the log.
        OSError: No compiler, or no usable cache folder.
    """
    if not rebuild and (core := _prebuilt(sources)):
        return Built(path=core / LIBRARY, seconds=0.0)
    machine = Machine.this()
    beside = _region_beside(sources, machine)
    return obtain(library_target(sources, machine), cache_root(), rebuild=rebuild, beside=beside)


def build_region(library: Built, sources: Path, *, rebuild: bool = False) -> Built:
    """Return the Python extension ``_region``, linked with ``library``; see `build_library`."""
    if not rebuild and (core := _prebuilt(sources)):
        return Built(path=core / region_name(), seconds=0.0)
    target = region_target(sources, Machine.this(), library.path.parent)
    return obtain(target, cache_root(), rebuild=rebuild)


def library_target(sources: Path, machine: Machine) -> SharedObject:
    """Return what ``libamp_plugin.so`` is made of."""
    return SharedObject(
        file_name=LIBRARY,
        sources=_library_sources(sources),
        headers=_files(sources, "*.h"),
        include_dirs=include_dirs(),
        compile_flags=compile_flags("-O1"),  # dispatch code has no loops: no call is faster above -O1
        link_flags=(
            *link_flags("torch_cpu", "c10", portable=machine.portable),
            f"-Wl,-soname,{LIBRARY}",
        ),
        joined=_joined(),
        apart=_apart(),
        vector_flags=vector_flags(machine),
        vectorized=(*ARITHMETIC, FOR_CUDA),
    )


def region_target(sources: Path, machine: Machine, folder: Path | None = None) -> SharedObject:
    """Return what the extension is made of; ``folder`` holds the library that it is linked with."""
    paths = () if folder is None else (f"-L{folder}",)
    found = () if folder is None or machine.portable else (f"-Wl,-rpath,{folder}",)
    return SharedObject(
        file_name=region_name(),
        sources=_files(sources / "python", "*.cpp"),
        headers=(*_files(sources, "*.h"), *_files(sources / "python", "*.h")),
        include_dirs=(*include_dirs(), python_headers()),
        compile_flags=compile_flags(),
        link_flags=(
            *link_flags("torch_python", "torch_cpu", "c10", portable=machine.portable),
            *paths,
            *found,
            "-Wl,--no-as-needed",
            f"-l:{LIBRARY}",
        ),
        joined=_joined(),
    )


def region_name() -> str:
    """Return the extension's file name, which holds Python's ABI."""
    return f"{REGION}{sysconfig.get_config_var('EXT_SUFFIX')}"


def source_files(sources: Path) -> tuple[Path, ...]:
    """Return all C++ sources and headers in ``sources`` and its ``python`` folder."""
    folders = (sources, sources / "python")
    return tuple(
        file for folder in folders for pattern in ("*.cpp", "*.h") for file in _files(folder, pattern)
    )


def _prebuilt(sources: Path) -> Path | None:
    return find_prebuilt(source_files(sources), (LIBRARY, region_name()), PREBUILT)


def _region_beside(sources: Path, machine: Machine) -> SharedObject | None:
    """Return what is compiled at the same time as the library; it is linked later, with the library."""
    try:
        return region_target(sources, machine) if _joined() else None
    except FileNotFoundError:  # no Python.h; `build_region` says so
        return None


def _library_sources(sources: Path) -> tuple[Path, ...]:
    """Return what the library is made of; a torch without CUDA never calls what launches its kernels."""
    with_cuda = torch.version.cuda is not None or torch.version.hip is not None
    files = _files(sources, "*.cpp")
    return tuple(file for file in files if with_cuda or not file.name.startswith(FOR_CUDA))


def _apart() -> tuple[tuple[str, ...], ...]:
    """Return the groups of sources that are compiled beside the rest.

    A group's headers are read once more, so there are no more groups than cores to compile them.
    """
    if jobs() == 1:
        return ()
    arithmetic = tuple((word,) for word in ARITHMETIC) if jobs() >= MANY_CORES else (ARITHMETIC,)
    return (*arithmetic, (FOR_CUDA,))


def _joined() -> bool:
    value = os.environ.get("AMP_PLUGIN_SEPARATE_SOURCES", "0")
    if value not in {"0", "1"}:
        msg = (
            f"AMP_PLUGIN_SEPARATE_SOURCES={value!r} is not allowed; "
            "use 0 (all in one, the default) or 1 (each source by itself)"
        )
        raise ValueError(msg)
    return value == "0"


def _files(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern)))


def _import_extension(path: Path) -> ModuleType:
    name = f"{__package__}.{REGION}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        msg = f"{path} is not a Python extension"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module
