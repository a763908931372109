"""Pack the files for a machine that has a GPU and no network: ``make gpu-proof``.

The pack contains the sources under git and ``run.sh``. With ``--python`` (a Python with that machine's torch)
it also contains the compiled native core and CUDA kernels; otherwise they are compiled there. ``--with`` adds
packages that the machine lacks.

    python -m tests.gpu_proof build/gpu-proof.tar.gz --python /venv/bin/python --cuda sm_90 --with omegaconf altair

On that machine, in the folder of the unpacked files:

    ./run.sh first-ten-minutes --results DIR
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 60 * 2**20  # largest size of the pack in bytes
# Left out: figures of other machines would be mistaken for those of this one.
LEFT_OUT = ("benchmarks/results/nvidia-*.json",)
RUN = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
cd "$here" || exit 1
export PYTHONPATH="$here:$here/site" AMP_PLUGIN_CACHE_DIR="${AMP_PLUGIN_CACHE_DIR:-$here/kernels}"
export PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m tests.on_gpu "$@"
"""
COMPILE = """
from amp_plugin.kernels.build import native_core
core = native_core()
print(core)
raise SystemExit(not core.loaded)
"""


def sources() -> list[Path]:
    """Return the files under git, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).exists()]
    return [Path(name) for name in names if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)]


def stage(folder: Path) -> None:
    """Put the sources and ``run.sh`` into a folder."""
    for path in sources():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    script = folder / "run.sh"
    script.write_text(RUN)
    script.chmod(0o755)


def compile_for(python: str, architectures: Sequence[str], folder: Path) -> None:
    """Compile the native core and the CUDA kernels with the torch of ``python``, from the sources in the folder."""
    kernels = folder / "kernels"
    kernels.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder), "AMP_PLUGIN_CACHE_DIR": str(kernels)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    cubins = [word for architecture in architectures for word in ("--cuda", architecture)]
    for command in ([python, "-c", COMPILE], [python, "-m", "amp_plugin", "build", *cubins]):
        subprocess.run(command, cwd=folder, env=environment, check=True)


def install(python: str, packages: Sequence[str], folder: Path) -> None:
    """Install packages into ``site``, without their dependencies."""
    options = ["--no-deps", "--no-compile", "--quiet", "--target", str(folder / "site")]
    subprocess.run([python, "-m", "pip", "install", *options, *packages], check=True)


def pack(folder: Path, target: Path) -> int:
    """Write a folder as an archive. Return its size in bytes.

    Raises:
        ValueError: The archive is too large to transfer.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, ".")
    size = target.stat().st_size
    if size > MOST:
        target.unlink()
        msg = (
            f"the pack has {size / 2**20:.0f} MiB, more than {MOST / 2**20:.0f}; name fewer packages or GPUs"
        )
        raise ValueError(msg)
    return size


def main(words: Sequence[str] | None = None) -> int:
    """Make the pack. Return 1 if that fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_proof", description="Pack for a GPU.")
    parser.add_argument("target", type=Path, help="the archive, .tar.gz")
    parser.add_argument("--python", help="compile for the torch of this Python; without it, sources alone")
    parser.add_argument(
        "--cuda", nargs="+", default=["sm_90"], metavar="sm_XY", help="GPUs; sm_90 by default"
    )
    parser.add_argument("--with", nargs="+", default=[], dest="packages", help="packages to take along")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            stage(folder)
            if asked.python:
                compile_for(asked.python, asked.cuda, folder)
            if asked.packages:
                install(asked.python or sys.executable, asked.packages, folder)
            size = pack(folder, asked.target)
        except (subprocess.CalledProcessError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
    print(f"{asked.target}: {size / 2**20:.1f} MiB; there: ./run.sh first-ten-minutes --results DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
