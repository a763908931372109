"""The build cache: a folder that only its owner writes to, with files that are checked before they are used.

A file ends with a seal: the SHA-256 of all that is in front of it. A file that was cut short, or that lost
blocks in a power cut, does not match its seal and is made again. Loaders of machine code ignore what follows
the last section.
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
    """Return the cache folder, made if need be; OSError or ValueError if it cannot be used."""
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
    """Refuse what anyone but the user and root could have written: it is code that we run."""
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
    """Return 16 hexadecimal digits that stand for ``parts``, whatever their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def obtain(file: Path, make: Callable[[Path], Path], *, rebuild: bool = False) -> Path:
    """Return a cached file, which ``make`` makes in an empty folder if it is not there, in one process.

    A file that does not match its seal counts as not there. An OSError says that the file cannot be written.
    """
    if not rebuild and is_cached(file):
        return file  # only read: the cache may be on a read-only file system
    _require_writable(file)
    with FileLock(file.with_name(file.name + ".lock"), mode=0o600):  # the system frees it if we are killed
        if not rebuild and is_cached(file):  # another process was faster
            return file
        for left_over in file.parent.glob(f"{file.name}.tmp-*"):  # of builds that were killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=file.parent) as folder:
            made = make(Path(folder))
            _seal(made)
            made.chmod(0o644)  # root may build for all users of a machine
            made.replace(file)
        _write_to_disk(file.parent)
    return file


def is_cached(file: Path) -> bool:
    """Return True if the cache holds this file and it is whole."""
    if not file.exists():
        return False
    _require_trusted(file.parent)
    _require_trusted(file)
    content, seal, hashed = file.read_bytes().rpartition(_SEAL)
    return bool(seal) and hashlib.sha256(content).digest() == hashed


def read_cached(file: Path) -> bytes:
    """Return what ``make`` has written into a cached file."""
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
    """Add the seal, and have all of it on the disk before the file gets its name."""
    hashed = hashlib.sha256(file.read_bytes()).digest()
    with file.open("ab") as whole:
        whole.write(_SEAL + hashed)
        whole.flush()
        os.fsync(whole.fileno())


def _write_to_disk(folder: Path) -> None:
    """Have a folder's new names on the disk; some network file systems do not offer it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
