"""Find and write the files of a recording, which is a single file or a folder with a file for each rank.

A folder ``run.amp/`` holds ``rank-0.amp``, ``rank-1.amp`` and so on, and ``manifest.json``. The manifest
contains the format, the number of ranks, the dimensions of the device mesh if they are known, and the names
of all files. Each rank writes the same manifest, so that the manifest exists even if some ranks fail. A rank
is missing if its file is listed in the manifest but does not exist. Each file is written under a temporary
name and then renamed, so a reader never finds a partial file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

MANIFEST = "manifest.json"
_NO_MESH: Final[Mapping[str, int]] = {}
_FORMAT = "amp_plugin ranks 1"
_ANOTHER_KIND = "{path} is {kind}, but this recording needs {other}; remove it, or record to another path"


def seat_of_process() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    The rank and the number of ranks come from the process group or from the launcher's environment. Without
    these, return (0, 1).
    """
    seats = [(0, 1)]
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal():
        seats.append((int(rank), int(ranks)))
    if dist.is_available() and dist.is_initialized():
        seats.append((dist.get_rank(), dist.get_world_size()))
    return max(seats, key=lambda seat: seat[1])


def _replace(file: Path, save: Callable[[Path], object]) -> None:
    """Write a file atomically, so that another process never reads a partial file."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


class RankFile:
    """The file that this process writes for one rank.

    Args:
        path: The path of the recording, which is a folder if there are several ranks, and otherwise a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seat = 0, 1  # rank and number of ranks, as far as they are known

    @property
    def has_other_ranks(self) -> bool:
        """Whether other processes record, too."""
        return self._seat[1] > 1

    @property
    def path(self) -> Path:
        """The path of the file that this process writes."""
        return self._path / f"rank-{self._seat[0]}.amp" if self.has_other_ranks else self._path

    def settle(self, seat: tuple[int, int] | None = None, mesh: Mapping[str, int] = _NO_MESH) -> None:
        """Determine the rank and the number of ranks, and create the folder if there are several ranks.

        An earlier file of this rank in the folder is removed.

        A process group may be created after the recording has begun, and destroyed before the recording ends.
        This method is therefore called several times, and keeps the largest number of ranks that it has seen.

        Args:
            seat: The rank and the number of ranks. The default is the rank of this process.
            mesh: The sizes of the dimensions of the device mesh, as far as they are known.

        Raises:
            FileExistsError: ``path`` is a folder although there is a single rank, or a file although there
                are several ranks.
        """
        seat = seat or seat_of_process()
        if seat[1] > self._seat[1]:
            if self._path.exists() and not self._path.is_dir():
                raise FileExistsError(
                    _ANOTHER_KIND.format(path=self._path, kind="a file", other="a folder for its ranks")
                )
            self._seat = seat
            self._path.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            self._write_manifest(mesh)
        elif not self.has_other_ranks and self._path.is_dir():
            raise FileExistsError(
                _ANOTHER_KIND.format(path=self._path, kind="a folder", other="a file, for one process")
            )

    def write(self, save: Callable[[Path], object], mesh: Mapping[str, int] = _NO_MESH) -> None:
        """Write the file of this process by calling ``save`` with a path.

        The sizes of the dimensions of the device mesh are written to the manifest if they are known.
        """
        _replace(self.path, save)
        if self.has_other_ranks and mesh:
            self._write_manifest(mesh)

    def _write_manifest(self, mesh: Mapping[str, int]) -> None:
        names = [f"rank-{rank}.amp" for rank in range(self._seat[1])]
        held = {"format": _FORMAT, "world_size": self._seat[1], "mesh": mesh, "files": names}
        text = json.dumps(held, indent=2) + "\n"
        _replace(self._path / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def recorded_files(path: Path) -> list[Path]:
    """Return the files of a recording, one for each rank. The file of a rank that was killed may be missing.

    If ``path`` is a file, the recording is this single file.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: ``path`` is a folder that does not contain a recording.
    """
    path.stat()  # raises FileNotFoundError
    if not path.is_dir():
        return [path]
    try:
        held = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = [path / name for name in held["files"]] if held["format"] == _FORMAT else []
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = f"{path} is not the folder of a recorded run: its {MANIFEST} cannot be read"
        raise ValueError(msg) from error
    if not files:
        msg = (
            f"{path} was recorded in a format that this release of amp_plugin does not read (see its "
            f"{MANIFEST}); record the run again"
        )
        raise ValueError(msg)
    return files


def missing_ranks(files: Sequence[Path]) -> tuple[int, ...]:
    """Return the ranks whose file does not exist."""
    return tuple(rank for rank, file in enumerate(files) if not file.exists())
