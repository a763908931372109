"""Compile the native core for a wheel: ``python -m amp_plugin.kernels.bundle FOLDER``.

Other than at first use, code is made for every CPU of a kind and not for this one, once for AVX2 and
once for AVX-512, and no path of this machine stays in the files. Each is made for the torch that is
installed and for this Python.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from amp_plugin.kernels.build import (
    LIBRARY,
    SOURCES,
    library_target,
    region_name,
    region_target,
    source_files,
)
from amp_plugin.kernels.build_cache import cache_root
from amp_plugin.kernels.prebuilt import MANIFEST, TARGETS, Needed, checksum
from amp_plugin.kernels.shared_object import obtain
from amp_plugin.kernels.torch_flags import Machine


def bundle(into: Path, sources: Path = SOURCES, capabilities: Iterable[str] = tuple(TARGETS)) -> list[Path]:
    """Compile a core for each vector width.

    Args:
        into: Folder that gets one folder for each.
        sources: Folder of the C++ sources.
        capabilities: Keys of `TARGETS`.

    Returns:
        The folders made.
    """
    made = []
    for capability in capabilities:
        machine = Machine(architecture=TARGETS[capability], capability=capability, portable=True)
        beside = region_target(sources, machine)
        library = obtain(library_target(sources, machine), cache_root(), beside=beside)
        region = obtain(region_target(sources, machine, library.path.parent), cache_root())
        needed = Needed.here(source_files(sources), capability)
        core = into / f"torch-{needed.torch.partition(' ')[0]}-{capability.lower()}"
        core.mkdir(parents=True, exist_ok=True)
        for built, name in ((library, LIBRARY), (region, region_name())):
            shutil.copy(built.path, core / name)
        sums = {name: checksum(core / name) for name in (LIBRARY, region_name())}
        (core / MANIFEST).write_text(json.dumps({"made for": asdict(needed), "sha256": sums}, indent=1))
        made.append(core)
    return made


if __name__ == "__main__":
    for folder in bundle(Path(sys.argv[1])):
        sys.stdout.write(f"{folder}\n")
