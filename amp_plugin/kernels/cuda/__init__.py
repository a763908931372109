"""The CUDA kernels that there are, which NVRTC compiles on the user's machine, and how they fill a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
LAYOUT: Final = SOURCES.parent / "csrc" / "cuda_layout.h"  # what C++ and kernels share
NORMS: Final = ("Squares", "Maximum", "Power")  # the structs of norms.cuh, in the order of cuda_device.h
_OF_EACH_NORM: Final = ("norm_check", "unscale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel: the function ``name`` in ``name.cu``."""

    name: str
    norm: str = ""  # one of NORMS if the file is compiled once for each norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """How kernels that work on a table of tensors fill a GPU."""

    blocks: int = 4  # of 256 threads that share a multiprocessor
    in_flight: int = 4  # 16-byte loads that a thread issues before it uses the first

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Return what the sources take from the compiler's command line."""
        return (("BLOCKS_PER_MULTIPROCESSOR", str(self.blocks)), ("IN_FLIGHT", str(self.in_flight)))


TUNING = Tuning()  # of all devices; a measurement of others sets it before the first is opened


def all_kernels() -> Iterator[Kernel]:
    """Yield every kernel of the package, in every form."""
    for file in sorted(SOURCES.glob("*.cu")):
        for norm in NORMS if file.stem in _OF_EACH_NORM else ("",):
            yield Kernel(name=file.stem, norm=norm)
