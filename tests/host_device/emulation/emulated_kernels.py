"""The package's CUDA kernels, compiled for the CPU from the same sources."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from amp_plugin.kernels.cuda import LAYOUT, RULES, SOURCES, Kernel, Tuning

HERE = Path(__file__).parent
FLAGS = [
    "-std=c++20",
    "-O1",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-dangling-pointer",
    "-ffp-contract=off",
    "-shared",
    "-Wl,-Bsymbolic",  # the C library also has a function named `step`
    "-fPIC",
    "-fsanitize=alignment,bounds,shift",
    "-fno-sanitize-recover",
]


def compiler() -> str | None:
    """Return the path of g++, which the emulation needs."""
    return shutil.which("g++")


def torch_headers() -> list[str]:
    """Return the flags for g++ to find torch's headers."""
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include")
    return [flag for folder in folders for flag in ("-isystem", str(folder))]


def torch_libraries(*names: str) -> list[str]:
    """Return the flags for g++ to link torch's libraries."""
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", *(f"-l{name}" for name in names)]


def build(kernel: Kernel, folder: Path, sources: Path = SOURCES, tuning: Tuning | None = None) -> Path:
    """Compile a kernel for the CPU.

    An object that was compiled from the same sources is reused, wherever those are.
    """
    command = [compiler(), *FLAGS, f"-DKERNEL={kernel.name}", f'-DKERNEL_FILE="{kernel.name}.cu"']
    macros = (*kernel.macros(), *(tuning or Tuning()).macros())
    command += [f"-D{name}={value}" for name, value in macros]
    inputs = [
        *sorted(sources.glob("*.cu*")),
        LAYOUT,
        *sorted(RULES.glob("*.h")),
        *sorted(HERE.glob("*.h")),
        *sorted(HERE.glob("*.cpp")),
    ]
    identity = hashlib.sha256(b"".join([repr(command).encode(), *(path.read_bytes() for path in inputs)]))
    command += [f"-I{sources}", f"-I{HERE}", str(HERE / "emulate.cpp")]
    target = folder / f"{kernel.title.replace(' ', '-')}-{identity.hexdigest()[:16]}.so"
    with FileLock(f"{target}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / target.name
                done = subprocess.run(
                    [*command, "-o", str(built)], check=False, capture_output=True, text=True
                )
                if done.returncode:
                    msg = f"g++ cannot compile {kernel.name}.cu: {done.stderr.strip()}"
                    raise RuntimeError(msg)
                built.replace(target)
    return target


def object_folder() -> Path:
    """Return the private folder of this user in which compiled kernels are kept between runs."""
    folder = Path(tempfile.gettempdir()) / f"amp_plugin_emulation_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="amp_plugin_emulation_"))
    return folder
