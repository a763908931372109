"""Compiles ``.cu`` files to cubins with NVRTC and ``cuda-core``. No GPU is needed."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from cuda.bindings import nvrtc  # type: ignore[import-untyped]
from cuda.core import Program, ProgramOptions  # type: ignore[import-untyped]

from amp_plugin.kernels.build_cache import cache_root, digest, obtain, read_cached
from amp_plugin.kernels.cuda import SOURCES, Kernel, all_kernels, shared_sources, tuning_of

ARCHITECTURES: Final = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The tested GPU architectures. Other architectures from sm_75 on work too, if NVRTC supports them."""

STANDARD: Final = "c++17"


def compile_cubin(kernel: Kernel, architecture: str) -> bytes:
    """Compile a kernel for a GPU architecture such as ``"sm_90"``. Raise RuntimeError if that fails."""
    source = source_of(kernel)
    program = None
    try:
        program = Program(source, "c++", options=options_for(kernel, architecture))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda-core's error types are private
        # Delete the Program object now, because the traceback would put it into a reference cycle.
        # When the garbage collector frees a Program object, an AttributeError is printed.
        del program
        log = str(error).replace("\0", "")
        msg = f"NVRTC cannot compile {kernel.name}.cu for {architecture}: {log}"
        raise RuntimeError(msg) from error


def source_of(kernel: Kernel) -> str:
    """Return a kernel's source with full header paths, since NVRTC searches the working directory first."""
    return (SOURCES / f"{kernel.name}.cu").read_text().replace('#include "', f'#include "{SOURCES}/')


def options_for(kernel: Kernel, architecture: str) -> ProgramOptions:
    """Return the options for NVRTC. They forbid fused multiply-adds except where the source calls ``fma``."""
    return ProgramOptions(
        name=f"{kernel.name}.cu",
        arch=architecture,
        std=STANDARD,
        fma=False,
        device_as_default_execution_space=True,
        define_macro=[*tuning_of(kernel).macros(), *kernel.macros()],
    )


def cached_cubin(kernel: Kernel, architecture: str) -> bytes:
    """Return the cubin of a kernel, compiling it only if it is not in the build cache.

    If the cache cannot be used, a RuntimeWarning is issued and the kernel is compiled for this process only.
    """
    identity = {
        "macros": repr((*tuning_of(kernel).macros(), *kernel.macros())),
        "standard": f"{STANDARD} fmad=false default-device",
        "sources": _sources(),
        "nvrtc": nvrtc_version(),
    }

    def make(folder: Path) -> Path:
        _announce(architecture)
        made = folder / "kernel.cubin"
        made.write_bytes(compile_cubin(kernel, architecture))
        return made

    try:
        cache = cache_root() / "cuda"
        cache.mkdir(mode=0o755, exist_ok=True)
        file = cache / f"{kernel.name}-{architecture}-{digest(identity)}.cubin"
        return read_cached(obtain(file, make))
    except (OSError, ValueError) as error:  # a full disk must not end training
        text = f"CUDA kernels are compiled for this process alone: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return compile_cubin(kernel, architecture)


def all_cubins(architecture: str) -> dict[Kernel, bytes]:
    """Return the cubins of all kernels. Several kernels are compiled in parallel."""
    kernels = list(all_kernels())
    cached_cubin(Kernel(name="update_scale"), architecture)  # fails early if all would fail
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        cubins = pool.map(lambda kernel: cached_cubin(kernel, architecture), kernels)
        return dict(zip(kernels, cubins, strict=True))


@functools.cache
def _announce(architecture: str) -> None:
    print(f"amp_plugin: compiling CUDA kernels for {architecture} (once) ...", file=sys.stderr, flush=True)


def identity_of(architecture: str, blocks: Sequence[int]) -> int:
    """Return a hash (1 to 2**24 - 1) of everything that can change the last bits of results."""
    parts = {"architecture": architecture, "blocks": str(list(blocks)), "sources": _sources()}
    return 1 + int(digest({**parts, "nvrtc": nvrtc_version()}), 16) % (2**24 - 1)


def architecture_for(major: int, minor: int) -> str:
    """Return the newest architecture that both NVRTC and a GPU of this compute capability support.

    A GPU can run machine code of the same major compute capability, if the minor one is not higher.
    """
    error, count = nvrtc.nvrtcGetNumSupportedArchs()
    known = [] if int(error) else list(nvrtc.nvrtcGetSupportedArchs()[1])[:count]
    fitting = [number for number in known if 10 * major <= number <= 10 * major + minor]
    if not fitting:
        newest = f"up to sm_{max(known, default=0)}, not for sm_{major}{minor}"
        msg = f"NVRTC {nvrtc_version()} compiles for {newest}; install a newer nvidia-cuda-nvrtc"
        raise RuntimeError(msg)
    return f"sm_{max(fitting)}"


def build_ahead(architectures: Iterable[str] = ARCHITECTURES) -> int:
    """Compile all kernels for these architectures into the build cache. Return the number of cubins."""
    return sum(len(all_cubins(architecture)) for architecture in architectures)


@functools.cache
def _sources() -> str:
    return digest({file.name: file.read_text() for file in shared_sources()})


@functools.cache
def nvrtc_version() -> str:
    """Return the version of the loaded NVRTC library, such as ``"13.0"``."""
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"
