"""Find the native core that a wheel brought along, where it fits the installed torch and this CPU.

A wheel may hold several cores, each in a folder of its own with the library, the Python extension
and ``manifest.json``: torch's version, commit and CUDA version, the vector width, a hash of the
sources, and the files' SHA-256. Where none fits, the core is compiled at first use, as from any
other wheel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

FOLDER: Final = Path(__file__).parent / "prebuilt"
MANIFEST: Final = "manifest.json"
TARGETS: Final = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
"""Vector width, as ``torch.backends.cpu.get_cpu_capability()`` names it -> the compiler's ``-march``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What a prebuilt core must have been made for.

    Attributes:
        torch: torch's version, commit and CUDA version.
        sources: Hash of the C++ sources.
        capability: A key of `TARGETS`.
    """

    torch: str
    sources: str
    capability: str

    @classmethod
    def here(cls, sources: Iterable[Path], capability: str) -> Needed:
        """Return what is needed with the torch that is installed."""
        return cls(torch=torch_identity(), sources=hash_of(sources), capability=capability)


def torch_identity() -> str:
    """Return torch's version, commit and CUDA or ROCm version in one line; a core for CUDA holds more."""
    device = torch.version.cuda or torch.version.hip or "cpu"
    return f"{torch.__version__} {torch.version.git_version} {device}"


def hash_of(files: Iterable[Path]) -> str:
    """Return a hash of files' names and contents."""
    content = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        text = file.read_bytes()
        content.update(f"{file.name}\0{len(text)}\0".encode() + text)
    return content.hexdigest()


def capabilities() -> tuple[str, ...]:
    """Return the vector widths that run here, the widest first."""
    widest = torch.backends.cpu.get_cpu_capability()
    if widest not in TARGETS:
        return ()
    return tuple(name for name in ("AVX512", "AVX2") if widest in (name, "AVX512"))


def find_prebuilt(sources: Iterable[Path], file_names: Iterable[str], folder: Path = FOLDER) -> Path | None:
    """Return the folder of the prebuilt core that fits, or None.

    Args:
        sources: The C++ sources and headers that are installed.
        file_names: Files that it must hold whole: the library, and the extension for this Python.
        folder: Where prebuilt cores are.
    """
    if not folder.is_dir():
        return None
    sources, names = tuple(sources), tuple(file_names)
    for capability in capabilities():
        needed = Needed.here(sources, capability)
        for core in sorted(path for path in folder.iterdir() if path.is_dir()):
            if _fits(core, needed, names):
                return core
    return None


def _fits(core: Path, needed: Needed, names: tuple[str, ...]) -> bool:
    try:
        manifest = json.loads((core / MANIFEST).read_text())
        made_for = Needed(**manifest["made for"])
        whole = all(manifest["sha256"][name] == checksum(core / name) for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return whole and made_for == needed


def checksum(file: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
