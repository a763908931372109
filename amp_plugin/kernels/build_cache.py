"""The build cache is a folder that only its owner can write to. Files are checked before they are used.

Each file ends with a checksum, which is the SHA-256 hash of everything before it. A truncated or damaged file
does not match its checksum, and is rebuilt. Loaders of libraries and cubins ignore the checksum, because it
comes after the last section of the ELF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from filelock import FileLock

_WAY_OUT: Final = "set AMP_PLUGIN_CACHE_DIR to a folder of your own"
_ROOT: Final = 0
_SEAL: Final = b"amp_plugin sha256:"


def cache_root() -> Path:
    """Return the cache folder, creating it if it is missing.

    Raises:
        OSError, ValueError: the folder cannot be created or used.
    """
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get("AMP_PLUGIN_CACHE_DIR") or f"{shared}/amp_plugin"
    root = Path(os.path.expanduser(given))  # noqa: PTH111 - no error if there is no home folder
    if not root.is_absolute():
        msg = f"the cache folder {given!r} is not an absolute path; {_WAY_OUT}"
        raise ValueError(msg)
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"the cache folder {root} cannot be made ({error.strerror}); {_WAY_OUT}"
        raise OSError(msg) from error
    _require_trusted(root)
    return root


def _require_trusted(path: Path) -> None:
    """Raise if anyone other than the user and root can write to a file whose code will be executed."""
    status, user = path.stat(), os.geteuid()
    if status.st_uid not in {user, _ROOT}:
        msg = (
            f"{path} in the build cache belongs to user {status.st_uid}, neither to you ({user}) nor to "
            f"root; {_WAY_OUT}"
        )
        raise PermissionError(msg)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        msg = f"others can write to {path} in the build cache (mode {mode}); chmod go-w it, or {_WAY_OUT}"
        raise PermissionError(msg)


def digest(parts: Mapping[str, str]) -> str:
    """Return a hash of a mapping as 16 hexadecimal digits. The order of the items does not matter."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def obtain(file: Path, make: Callable[[Path], Path], *, rebuild: bool = False) -> Path:
    """Return a cached file. If the file is missing, one process calls ``make`` to build it.

    ``make`` gets an empty folder, builds the file, and returns its path. Files that do not match their
    checksum count as missing.

    Raises:
        OSError: the cached file cannot be written.
    """
    if not rebuild and is_cached(file):
        # A cached file is returned without writing anything, because the file system may be read-only.
        return file
    _require_writable(file)
    # If this process is killed, the operating system releases the lock.
    with FileLock(file.with_name(file.name + ".lock"), mode=0o600):
        if not rebuild and is_cached(file):  # another process has built it
            return file
        for left_over in file.parent.glob(f"{file.name}.tmp-*"):  # by killed builds
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=file.parent) as folder:
            made = make(Path(folder))
            _seal(made)
            made.chmod(0o644)  # root may build for all users
            made.replace(file)
        _write_to_disk(file.parent)
    return file


def is_cached(file: Path) -> bool:
    """Return True if a file is in the cache and matches its checksum."""
    if not file.exists():
        return False
    _require_trusted(file.parent)
    _require_trusted(file)
    content, seal, hashed = file.read_bytes().rpartition(_SEAL)
    return bool(seal) and hashlib.sha256(content).digest() == hashed


def read_cached(file: Path) -> bytes:
    """Return the content of a cached file without the checksum at its end."""
    return file.read_bytes().rpartition(_SEAL)[0]


def _require_writable(file: Path) -> None:
    if os.access(file.parent, os.W_OK):
        return
    found = "is damaged" if file.exists() else "is missing"
    msg = (
        f"{file.name} {found} in the build cache {file.parent}, which you cannot write to; let its owner run "
        f"`amp-plugin build` on such a machine, or {_WAY_OUT}"
    )
    raise PermissionError(msg)


def _seal(file: Path) -> None:
    """Append the checksum and flush the file to disk, before the file gets its final name."""
    hashed = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(_SEAL + hashed)
        whole.flush()
        os.fsync(whole.fileno())


def _write_to_disk(folder: Path) -> None:
    """Flush a folder's entries to disk. Do nothing if the file system cannot flush folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
