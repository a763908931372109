"""The files of a recording: one file of a single process, or a folder with a file for each rank.

A folder ``run.amp/`` holds ``rank-0.amp``, ``rank-1.amp`` and so on, and ``manifest.json``. The manifest has
the format, the number of ranks, the dimensions of the device mesh if they are known, and the names of all
files. Each rank writes the same manifest, so that it is there whichever rank dies. A name without its file is
a rank that is missing. Each file is written under another name and then renamed, so a reader never meets half
of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

MANIFEST = "manifest.json"
_FORMAT = "amp_plugin ranks 1"
_ANOTHER_KIND = (
    "{path} is {kind}, and this recording needs {other}; remove it, or give the recording another name"
)


def seat_of_process() -> tuple[int, int]:
    """Return the rank and the number of ranks, of the process group or of the launcher; else (0, 1)."""
    seats = [(0, 1)]
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal():
        seats.append((int(rank), int(ranks)))
    if dist.is_available() and dist.is_initialized():
        seats.append((dist.get_rank(), dist.get_world_size()))
    return max(seats, key=lambda seat: seat[1])


def _replace(file: Path, save: Callable[[Path], object]) -> None:
    """Write a file in one piece: another process finds the old one or the new one."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


class RankFile:
    """The file that this process writes.

    Args:
        path: of the recording: the file itself, or the folder if there are several ranks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rank, self._ranks = 0, 1
        self._mesh: dict[str, int] = {}

    @property
    def has_other_ranks(self) -> bool:
        """Whether other processes record, too."""
        return self._ranks > 1

    @property
    def path(self) -> Path:
        """The path of the file that this process writes."""
        return self._path / f"rank-{self._rank}.amp" if self.has_other_ranks else self._path

    def settle(self) -> None:
        """Find out which rank this is. One of several makes the folder, and drops its own earlier file.

        A process group may be made after a recording has begun, and destroyed before it ends. Therefore this
        is called more than once, and the largest number of ranks counts.

        Raises:
            FileExistsError: there is a folder where a file is to be, or a file where a folder is to be.
        """
        rank, ranks = seat_of_process()
        if ranks > self._ranks:
            if self._path.exists() and not self._path.is_dir():
                raise FileExistsError(
                    _ANOTHER_KIND.format(path=self._path, kind="a file", other="a folder for its ranks")
                )
            self._rank, self._ranks = rank, ranks
            self._path.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            self._write_manifest()
        elif not self.has_other_ranks and self._path.is_dir():
            raise FileExistsError(
                _ANOTHER_KIND.format(path=self._path, kind="a folder", other="a file, for one process")
            )

    def note_mesh(self, dimensions: Mapping[str, int]) -> None:
        """Take note of a device mesh: the size of each dimension by name. The largest mesh counts."""
        if len(dimensions) > len(self._mesh):
            self._mesh = dict(dimensions)

    def write(self, save: Callable[[Path], object]) -> None:
        """Write the file of this process, by a function that writes to the path that it is given."""
        _replace(self.path, save)
        if self.has_other_ranks and self._mesh:
            self._write_manifest()

    def _write_manifest(self) -> None:
        names = [f"rank-{rank}.amp" for rank in range(self._ranks)]
        held = {"format": _FORMAT, "world_size": self._ranks, "mesh": self._mesh, "files": names}
        text = json.dumps(held, indent=2) + "\n"
        _replace(self._path / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class RecordedFiles:
    """The files of a recording that are there."""

    ranks: int  # that took part
    present: Mapping[int, Path]  # rank -> its file

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose file is not there."""
        return tuple(rank for rank in range(self.ranks) if rank not in self.present)

    @classmethod
    def find(cls, path: Path) -> RecordedFiles:
        """Find the files of a recording; of a file, that file alone.

        Raises:
            ValueError: it is a folder, and not a recording's.
        """
        if not path.is_dir():
            return cls(1, {0: path})
        try:
            held = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            files = [path / name for name in held["files"]] if held["format"] == _FORMAT else []
        except (OSError, ValueError, TypeError, KeyError) as error:
            msg = f"{path} is not the folder of a recorded run: its {MANIFEST} cannot be read"
            raise ValueError(msg) from error
        if not files:
            msg = f"{path} is not the folder of a recorded run that this release reads: see its {MANIFEST}"
            raise ValueError(msg)
        return cls(len(files), {rank: file for rank, file in enumerate(files) if file.exists()})
