"""Lists the CUDA kernels, which NVRTC compiles on the user's machine, and their launch parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
LAYOUT: Final = SOURCES.parent / "csrc" / "cuda_layout.h"  # shared by C++ and the kernels
RULES: Final = SOURCES.parent / "csrc" / "rules"  # rules of optimizer steps, also shared
NORMS: Final = ("Squares", "Maximum", "Power")  # the names of structs in norms.cuh
_OF_EACH_NORM: Final = ("norm_check", "unscale")


def rule_names() -> list[str]:
    """Return the names of the rules for the op ``step_``, in the order of ``rules/all.h``."""
    return re.findall(r"RULE\((\w+), [^)]+\)", (RULES / "all.h").read_text().split("#define")[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """The CUDA function ``name`` in ``name.cu``, compiled for one norm type, one rule, or neither."""

    name: str
    # A name in NORMS if the file is compiled once for each norm, else "".
    norm: str = ""
    # A name from rule_names() if the file is compiled once for each rule, else "".
    rule: str = ""

    @property
    def title(self) -> str:
        """The name by which ``cuda_device.cpp`` looks the kernel up."""
        return f"{self.name} {self.norm or self.rule}".strip()

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Return the macros with which the kernel's file is compiled."""
        chosen = (("NORM", self.norm), ("RULE", self.rule))
        return tuple((macro, value) for macro, value in chosen if value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The launch parameters of a kernel that processes a table of tensors."""

    # The number of thread blocks per multiprocessor. A block has 256 threads.
    blocks: int = 4
    # The number of 16-byte loads that a thread issues before it uses the first one.
    in_flight: int = 4

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Return the macros that pass these parameters to the compiler."""
        return (("BLOCKS_PER_MULTIPROCESSOR", str(self.blocks)), ("IN_FLIGHT", str(self.in_flight)))


TUNINGS: dict[str, Tuning] = {
    "multiply": Tuning(blocks=6),
    "pack_weights": Tuning(blocks=6),
    "unpack_weights": Tuning(blocks=6),
}
"""Maps a kernel's name to its fastest tuning on an H200, if this is not the default tuning.

A measurement may change this dict before the first device is opened.
"""


def tuning_of(kernel: Kernel) -> Tuning:
    """Return the launch parameters of a kernel."""
    return TUNINGS.get(kernel.name, Tuning())


def all_kernels() -> Iterator[Kernel]:
    """Yield every CUDA kernel of the package, for every norm type and every optimizer rule."""
    for file in sorted(SOURCES.glob("*.cu")):
        if file.stem in _OF_EACH_NORM:
            yield from (Kernel(name=file.stem, norm=norm) for norm in NORMS)
        elif file.stem == "step":
            yield from (Kernel(name=file.stem, rule=rule) for rule in rule_names())
        else:
            yield Kernel(name=file.stem)


def shared_sources() -> list[Path]:
    """Return all source files from which CUDA kernels are compiled."""
    return sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"), LAYOUT, *RULES.glob("*.h")])
