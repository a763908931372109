"""The list of CUDA kernels. NVRTC compiles them on the user's machine. ``Tuning`` is how they fill a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
LAYOUT: Final = SOURCES.parent / "csrc" / "cuda_layout.h"  # shared by C++ and the kernels
RULES: Final = SOURCES.parent / "csrc" / "rules"  # what a step does to an element, also shared
NORMS: Final = ("Squares", "Maximum", "Power")  # the structs of norms.cuh, in the order of cuda_device.h
_OF_EACH_NORM: Final = ("norm_check", "unscale")


def rule_names() -> list[str]:
    """Return the names of the rules that ``step_`` takes, in the order of ``rules/all.h``."""
    return re.findall(r"RULE\((\w+), [^)]+\)", (RULES / "all.h").read_text().split("#define")[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel: the function ``name`` in ``name.cu``, compiled for one norm, one rule or neither."""

    name: str
    norm: str = ""  # one of NORMS if the file is compiled once for each norm
    rule: str = ""  # one of rule_names() if the file is compiled once for each rule

    @property
    def title(self) -> str:
        """The kernel's name in ``cuda_device.cpp``."""
        return f"{self.name} {self.norm or self.rule}".strip()

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Return the macros that the kernel's file is compiled with."""
        chosen = (("NORM", self.norm), ("RULE", self.rule))
        return tuple((macro, value) for macro, value in chosen if value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """How a kernel that works on a table of tensors fills a GPU."""

    blocks: int = 4  # blocks of 256 threads per multiprocessor
    in_flight: int = 4  # 16-byte loads that a thread issues before it uses the first one

    def macros(self) -> tuple[tuple[str, str], ...]:
        """Return the macros that the sources are compiled with."""
        return (("BLOCKS_PER_MULTIPROCESSOR", str(self.blocks)), ("IN_FLIGHT", str(self.in_flight)))


TUNINGS: dict[str, Tuning] = {
    "multiply": Tuning(blocks=6),
    "pack_weights": Tuning(blocks=6),
    "unpack_weights": Tuning(blocks=6),
}
"""Maps a kernel's name to the best tuning on an H200, if that is not the default tuning.

A measurement may change it before the first device is opened."""


def tuning_of(kernel: Kernel) -> Tuning:
    """Return the tuning of a kernel."""
    return TUNINGS.get(kernel.name, Tuning())


def all_kernels() -> Iterator[Kernel]:
    """Yield every kernel of the package, in every form."""
    for file in sorted(SOURCES.glob("*.cu")):
        if file.stem in _OF_EACH_NORM:
            yield from (Kernel(name=file.stem, norm=norm) for norm in NORMS)
        elif file.stem == "step":
            yield from (Kernel(name=file.stem, rule=rule) for rule in rule_names())
        else:
            yield Kernel(name=file.stem)


def shared_sources() -> list[Path]:
    """Return all files from which kernels are compiled."""
    return sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"), LAYOUT, *RULES.glob("*.h")])
