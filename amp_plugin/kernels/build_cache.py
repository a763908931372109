"""The build cache: a folder to which only its owner writes. Files are checked before they are used.

A file ends with a seal, which is the SHA-256 of everything before it. A file that was cut short or damaged
does not match its seal and is made again. The seal does no harm in a library or a cubin: loaders ignore bytes
after the last section.
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
    """Return the cache folder, and make it first if it is missing.

    Raises:
        OSError, ValueError: the folder cannot be made or used.
    """
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get("AMP_PLUGIN_CACHE_DIR") or f"{shared}/amp_plugin"
    root = Path(os.path.expanduser(given))  # noqa: PTH111 - raises nothing without a home folder
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
    """Raise if anyone but the user and root could have written a file, since its code will run."""
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
    """Return a hash of ``parts`` in 16 hexadecimal digits; their order does not matter."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def obtain(file: Path, make: Callable[[Path], Path], *, rebuild: bool = False) -> Path:
    """Return a cached file. If it is missing, one process calls ``make`` with an empty folder to make it.

    A file that does not match its seal counts as missing.

    Raises:
        OSError: the file cannot be written.
    """
    if not rebuild and is_cached(file):
        return file  # Nothing was written: the cache may be on a read-only file system.
    _require_writable(file)
    # The operating system frees the lock if we are killed.
    with FileLock(file.with_name(file.name + ".lock"), mode=0o600):
        if not rebuild and is_cached(file):  # another process has made it meanwhile
            return file
        for left_over in file.parent.glob(f"{file.name}.tmp-*"):  # left by builds that were killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=file.parent) as folder:
            made = make(Path(folder))
            _seal(made)
            made.chmod(0o644)  # root may build for all users of the machine
            made.replace(file)
        _write_to_disk(file.parent)
    return file


def is_cached(file: Path) -> bool:
    """Return True if the cache holds this file and the file matches its seal."""
    if not file.exists():
        return False
    _require_trusted(file.parent)
    _require_trusted(file)
    content, seal, hashed = file.read_bytes().rpartition(_SEAL)
    return bool(seal) and hashlib.sha256(content).digest() == hashed


def read_cached(file: Path) -> bytes:
    """Return the content of a cached file, without its seal."""
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
    """Add the seal, and flush the file to the disk before it gets its final name."""
    hashed = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(_SEAL + hashed)
        whole.flush()
        os.fsync(whole.fileno())


def _write_to_disk(folder: Path) -> None:
    """Flush a folder's entries to the disk; some network file systems cannot do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
