"""NVRTC: from a ``.cu`` file to a cubin, once per architecture, kept in the build cache.

NVRTC comes with torch's CUDA wheels; ``cuda-core`` drives it. No nvcc, no header of a
toolkit and no GPU are needed, so all architectures can be compiled on any machine.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cuda.bindings import nvrtc  # type: ignore[import-untyped]
from cuda.core import Program, ProgramOptions  # type: ignore[import-untyped]

from amp_plugin.kernels.build_cache import (
    cache_root,
    digest,
    locked,
    publish_entry,
    read_entry,
    scratch_folder,
)
from amp_plugin.kernels.cuda.catalogue import Kernel, all_kernels

SOURCES: Final = Path(__file__).parent
ARCHITECTURES: Final = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What is tested; any other architecture that NVRTC knows, from sm_75 on, compiles as well."""

CUBIN: Final = "kernel.cubin"
STANDARD: Final = "c++17"


def compile_cubin(kernel: Kernel, architecture: str) -> bytes:
    """Compile a kernel with NVRTC.

    Args:
        kernel: What to compile.
        architecture: As ``"sm_90"``.

    Returns:
        Machine code of that architecture.

    Raises:
        RuntimeError: NVRTC is missing, does not know the architecture or rejects the source.
    """
    options = ProgramOptions(
        name=f"{kernel.name}.cu",
        arch=architecture,
        std=STANDARD,
        include_path=str(SOURCES),
        define_macro=("NORM", kernel.norm) if kernel.norm else None,
    )
    source = (SOURCES / f"{kernel.name}.cu").read_text()
    try:
        return bytes(Program(source, "c++", options=options).compile("cubin").code)
    except Exception as error:  # cuda-core's error types are not public
        log = str(error).replace("\0", "")
        msg = f"NVRTC cannot compile {kernel.name}.cu for {architecture}: {log}"
        raise RuntimeError(msg) from error


def cached_cubin(kernel: Kernel, architecture: str) -> bytes:
    """Return the cubin of a kernel, compiled only if the build cache has none.

    The entry depends on the sources, the architecture and NVRTC's version. If the cache
    folder cannot be used, or cannot keep this one, a RuntimeWarning says so and the kernel is
    compiled for this process alone.

    Args:
        kernel: Which kernel.
        architecture: As ``"sm_90"``.

    Returns:
        Machine code of that architecture.

    Raises:
        RuntimeError: As :func:`compile_cubin`.
    """
    try:
        folder = cache_root() / "cuda"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"CUDA kernels are compiled anew in each process: {error}", RuntimeWarning, stacklevel=2
        )
        return compile_cubin(kernel, architecture)
    identity = _identity(kernel, architecture)
    entry = folder / f"{kernel.name}-{architecture}-{digest(identity)}"
    try:
        cubin = read_entry(entry, CUBIN) or _publish(kernel, architecture, entry, identity)
        return cubin.read_bytes()
    except OSError as error:  # a full disk must not end a training run
        warnings.warn(
            f"{kernel.name} is compiled for this process alone, {folder} cannot keep it: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return compile_cubin(kernel, architecture)


def architecture_for(major: int, minor: int) -> str:
    """Return the newest architecture that NVRTC knows and whose machine code a GPU runs.

    Machine code runs on GPUs of the same major capability and the same or a higher minor one.

    Args:
        major: Of the GPU's compute capability.
        minor: Of the same.

    Raises:
        RuntimeError: NVRTC knows none.
    """
    error, count = nvrtc.nvrtcGetNumSupportedArchs()
    known = [] if int(error) else list(nvrtc.nvrtcGetSupportedArchs()[1])[:count]
    fitting = [number for number in known if 10 * major <= number <= 10 * major + minor]
    if not fitting:
        newest = f"sm_{max(known)}" if known else "nothing"
        msg = (
            f"NVRTC {nvrtc_version()} compiles for up to {newest}, not for sm_{major}{minor}; "
            "install a newer nvidia-cuda-nvrtc"
        )
        raise RuntimeError(msg)
    return f"sm_{max(fitting)}"


def _publish(kernel: Kernel, architecture: str, entry: Path, identity: dict[str, str]) -> Path:
    with locked(entry):
        if cubin := read_entry(entry, CUBIN):  # another process was faster
            return cubin
        with scratch_folder(entry) as scratch:
            built = scratch / "built"
            built.mkdir(mode=0o700)
            (built / CUBIN).write_bytes(compile_cubin(kernel, architecture))
            return publish_entry(built, entry, CUBIN, identity)


def build_ahead(architectures: Iterable[str] = ARCHITECTURES) -> int:
    """Compile every kernel into the build cache.

    Args:
        architectures: For which GPUs.

    Returns:
        How many cubins the cache now has for them.

    Raises:
        RuntimeError: As :func:`compile_cubin`.
    """
    return sum(bool(cached_cubin(kernel, arch)) for arch in architectures for kernel in all_kernels())


def _identity(kernel: Kernel, architecture: str) -> dict[str, str]:
    return {
        "kernel": kernel.name,
        "norm": kernel.norm or "",
        "architecture": architecture,
        "standard": STANDARD,
        "sources": _sources(),
        "nvrtc": nvrtc_version(),
    }


@functools.cache
def _sources() -> str:
    files = sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")])
    return digest({file.name: file.read_text() for file in files})


@functools.cache
def nvrtc_version() -> str:
    """Return the version of the NVRTC library in use, as ``"13.0"``.

    Raises:
        RuntimeError: The library is missing.
    """
    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        msg = f"NVRTC does not tell its version (error {int(error)}); reinstall nvidia-cuda-nvrtc"
        raise RuntimeError(msg)
    return f"{major}.{minor}"
