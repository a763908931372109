"""The kernels there are, by name and form; ``csrc/cuda_kernels.h`` has the same list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

THREADS: Final = 256  # kThreads in tensor_table.cuh
NORMS: Final = ("Squares", "Magnitudes", "Maximum", "Minimum", "Power")  # the structs of norms.cuh


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel: the function ``name`` in ``name.cu``.

    Attributes:
        name: Of the file, without suffix, and of the function in it.
        norm: One of `NORMS` if the file is compiled once for each norm, else None.
        threads: Threads of a block; the source relies on it.
    """

    name: str
    norm: str | None = None
    threads: int = THREADS


NORM_CHECK: Final = {norm: Kernel(name="norm_check", norm=norm) for norm in NORMS}
UNSCALE: Final = {norm: Kernel(name="unscale", norm=norm) for norm in NORMS}
MULTIPLY: Final = Kernel(name="multiply")
CAST: Final = Kernel(name="cast")
UPDATE_SCALE: Final = Kernel(name="update_scale", threads=1)
CLIP_FACTOR: Final = Kernel(name="clip_factor", threads=1)
ADAM: Final = Kernel(name="adam")
SGD: Final = Kernel(name="sgd")
PACK_WEIGHTS: Final = Kernel(name="pack_weights")
UNPACK_WEIGHTS: Final = Kernel(name="unpack_weights")
PACK_MEASUREMENTS: Final = Kernel(name="pack_measurements", threads=1)
UNPACK_MEASUREMENTS: Final = Kernel(name="unpack_measurements", threads=1)


def all_kernels() -> Iterator[Kernel]:
    """Yield every kernel of the package, in every form."""
    for family in (NORM_CHECK, UNSCALE):
        yield from family.values()
    yield from (MULTIPLY, CAST, UPDATE_SCALE, CLIP_FACTOR)
    yield from (ADAM, SGD, PACK_WEIGHTS, UNPACK_WEIGHTS)
    yield from (PACK_MEASUREMENTS, UNPACK_MEASUREMENTS)


def find(name: str, norm: str) -> Kernel:
    """Return a kernel of the list.

    Args:
        name: Of the kernel.
        norm: Its form; empty if it has none.

    Raises:
        KeyError: There is none.
    """
    kernels = {(kernel.name, kernel.norm or ""): kernel for kernel in all_kernels()}
    return kernels[name, norm]
