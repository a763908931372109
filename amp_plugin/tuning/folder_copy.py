"""Copy a folder, so that a program can run in the copy many times without changing the original.

On file systems that can clone files (Btrfs, XFS), files are cloned instead of copied. The copy contains no
link through which a program could write to the original. Before each run, the files that the previous run
changed are restored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from rich import filesize

_MOST_BYTES: Final = 2_000_000_000  # at most this many bytes are copied; cloned files do not count
_MOST_FILES: Final = 50_000
# The number of the Linux ioctl FICLONE on x86-64 and ARM. If a system refuses it, the file is copied.
_CLONE: Final = 0x40049409

Signature = tuple[int, int, int, int]  # numbers that change when a program writes to the file


class FolderCopy:
    """A temporary copy of a folder. The copy is removed when this object is closed or garbage-collected."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._place = tempfile.TemporaryDirectory(prefix="amp_plugin_tune_")
        # Maps each copied file to the signature that it had right after it was copied.
        self._kept: dict[Path, Signature | None] = {}

    @property
    def _copy(self) -> Path:
        return Path(self._place.name).resolve()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Restore the copy from the folder, and use the copy as the working directory in a ``with`` block."""
        present, shell = Path.cwd(), os.environ.get("PWD")
        self._restore()
        os.chdir(self._copy)
        os.environ["PWD"] = str(self._copy)
        try:
            yield
        finally:
            os.chdir(present)
            if shell is None:
                del os.environ["PWD"]
            else:
                os.environ["PWD"] = shell

    def close(self) -> None:
        """Remove the copy."""
        self._place.cleanup()

    def _restore(self) -> None:
        """Make the copy equal to the original folder again.

        Missing and changed files are copied again. Files that the original folder does not contain are
        removed from the copy.
        """
        wanted, copied = {self._copy}, 0
        entries = self._entries(self._folder, self._copy, (self._folder, self._copy))
        for number, (source, target) in enumerate(entries, 1):
            wanted.add(target)
            if number > _MOST_FILES:
                self._refuse(source, f"more than {_MOST_FILES:,} files")
            copied += self._restore_entry(source, target, copied)
        for folder, names, files in os.walk(self._copy, topdown=False):
            for name in (*files, *names):
                if (place := Path(folder, name)) not in wanted:
                    _remove(place)

    def _restore_entry(self, source: Path, target: Path, copied: int) -> int:
        """Make a file, folder or link in the copy equal to its original.

        Return the number of bytes that were copied.
        """
        if source.is_symlink() and self._stays_inside(source):
            if not target.is_symlink() or target.readlink() != source.readlink():
                _remove(target)
                target.symlink_to(source.readlink())
        elif source.is_dir():
            if target.is_symlink() or not target.is_dir():
                _remove(target)
                target.mkdir()
        elif target not in self._kept or self._kept[target] != _signature(target):
            _remove(target)
            size = self._copy_file(source, target, copied)
            self._kept[target] = _signature(target)
            return size
        return 0

    def _entries(self, source: Path, target: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
        """Yield each file, folder and link that must be copied, with its path in the copy.

        A folder comes before its contents.
        """
        for entry in sorted(source.iterdir()):
            copy = target / entry.name
            is_link = entry.is_symlink() and self._stays_inside(entry)
            if is_link or (entry.is_file() and os.access(entry, os.R_OK)):
                yield entry, copy
            elif _is_copied(entry, above):
                yield entry, copy
                yield from self._entries(entry, copy, (*above, entry.resolve()))

    def _stays_inside(self, link: Path) -> bool:
        """Return whether a link is relative and points into the folder, so that it also works in the copy."""
        to = link.readlink()
        return not to.is_absolute() and (link.parent.resolve() / to).resolve().is_relative_to(self._folder)

    def _copy_file(self, source: Path, target: Path, copied: int) -> int:
        """Clone or copy a file, and return the number of bytes that were copied.

        ``copied`` is the number of bytes that have been copied so far.
        """
        size = 0
        if not _clone(source, target):
            size = source.stat().st_size
            if copied + size > _MOST_BYTES or size > shutil.disk_usage(self._copy).free:
                self._refuse(source, f"{filesize.decimal(copied + size)} or more")
            shutil.copyfile(source, target)
        shutil.copystat(source, target)
        target.chmod(target.stat().st_mode | 0o600)
        return size

    def _refuse(self, reached: Path, size: str) -> None:
        msg = (
            f"the script runs in a copy of {self._folder}, so that it cannot overwrite your files, but "
            f"the copy would hold {size} (counted up to {reached.relative_to(self._folder)}). Run tune "
            "in a folder without large data, and give the script the full paths of files that it only "
            "reads. Or set TMPDIR to a folder of the same Btrfs or XFS file system, where copies take "
            "no space"
        )
        raise RuntimeError(msg)


def _is_copied(folder: Path, above: tuple[Path, ...]) -> bool:
    """Return whether a folder is copied.

    Virtual environments are not copied, and neither are links to a folder that contains them.
    """
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return False
    place = folder.resolve()
    is_environment = (folder / "pyvenv.cfg").is_file()
    return not is_environment and not any(upper.is_relative_to(place) for upper in above)


def _clone(source: Path, target: Path) -> bool:
    """Try to clone a file, and return False if the file system cannot clone files.

    A file and its clone share their blocks on the disk until a program writes to one of the two.
    """
    if fcntl is None:
        return False
    try:
        with source.open("rb") as original, target.open("wb") as copy:
            fcntl.ioctl(copy.fileno(), _CLONE, original.fileno())
    except OSError:
        return False
    return True


def _signature(file: Path) -> Signature | None:
    if file.is_symlink() or not file.is_file():
        return None
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
