"""The compiler's flags that make C++ fit the installed torch and this CPU.

Torch's headers, C++ ABI and vector width are taken over, and its OpenMP library is
linked by its file: a second one would start a second set of threads.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_CPU_FACTS = {"vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part", "isa"}


def include_dirs() -> tuple[Path, ...]:
    """Return the folders of torch's C++ headers."""
    include = Path(torch.__file__).parent / "include"
    return (include, include / "torch" / "csrc" / "api" / "include")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What code is made for.

    Attributes:
        architecture: The compiler's ``-march``.
        capability: Vector width, as ``torch.backends.cpu.get_cpu_capability()`` names it.
        portable: Leave paths of this machine out of the files; torch is imported before they are loaded.
    """

    architecture: str
    capability: str
    portable: bool = False

    @classmethod
    def this(cls) -> Machine:
        """Return this machine, with all instruction sets it has."""
        return cls(architecture="native", capability=torch.backends.cpu.get_cpu_capability())


def compile_flags(level: str = "-O2") -> tuple[str, ...]:
    """Return the flags for every source, paths apart; ``level`` is how much the compiler optimizes.

    The compiler does not hear of this machine's instruction sets: torch's headers then leave out those of
    its vectors, a quarter of all text.
    """
    return (
        *(level, "-std=c++20", "-fPIC", "-fopenmp", "-DNDEBUG"),
        "-DAT_PER_OPERATOR_HEADERS",  # else autograd's headers include those of all ops
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )


def vector_flags(machine: Machine | None = None) -> tuple[str, ...]:
    """Return the flags for sources that compute on elements; ``machine`` is this one by default."""
    machine = machine or Machine.this()
    capability = machine.capability
    vectors = (f"-DCPU_CAPABILITY_{capability}",) if capability in {"AVX2", "AVX512"} else ()
    return (
        *("-O3", f"-march={machine.architecture}"),
        *("-fno-math-errno", "-fno-trapping-math"),  # as torch itself is compiled
        *vectors,
    )


def link_flags(*libraries: str, portable: bool = False) -> tuple[str, ...]:
    """Return the linker's flags.

    Args:
        *libraries: Libraries of torch to link with, such as ``"torch_cpu"``.
        portable: Write no path into the result.
    """
    package = Path(torch.__file__).parent
    folder = package / "lib"
    bundled = sorted([*folder.glob("libgomp*.so*"), *(package.parent / "torch.libs").glob("libgomp*.so*")])
    openmp = str(bundled[0]) if bundled else "-fopenmp"
    names = (f"-l{name}" for name in libraries)
    paths = () if portable else (f"-Wl,-rpath,{folder}",)
    return ("-shared", f"-L{folder}", *paths, *names, openmp)


@cache
def cpu_identity() -> str:
    """Return the CPU's model and instruction sets: what ``-march=native`` depends on."""
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    pairs = (line.partition(":") for line in first_core.splitlines())
    return "\n".join(f"{name.strip()}:{value}" for name, _, value in pairs if name.strip() in _CPU_FACTS)
