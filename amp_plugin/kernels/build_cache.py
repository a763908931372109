"""The build cache: a private folder of finished shared objects and cubins.

A file is written in a temporary folder and then renamed, so an incomplete one is never seen. Loading it runs
its code, so the folder and the file must belong to the user alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

_WAY_OUT = "set AMP_PLUGIN_CACHE_DIR to a folder of your own"


def cache_root() -> Path:
    """Return the private cache folder, made if there is none.

    It is ``$AMP_PLUGIN_CACHE_DIR``, else ``$XDG_CACHE_HOME/amp_plugin``, else ``~/.cache/amp_plugin``; an
    OSError or a ValueError says why it cannot be used.
    """
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get("AMP_PLUGIN_CACHE_DIR") or f"{shared}/amp_plugin"
    root = Path(os.path.expanduser(given))  # noqa: PTH111 - it leaves a ~ where there is no home folder
    if not root.is_absolute():
        msg = f"the cache folder {given!r} is not an absolute path; {_WAY_OUT}"
        raise ValueError(msg)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = f"the cache folder {root} cannot be made ({error.strerror}); {_WAY_OUT}"
        raise OSError(msg) from error
    _require_private(root)
    return root


def _require_private(path: Path) -> None:
    status, user = path.stat(), os.geteuid()
    if status.st_uid != user:
        msg = f"{path} in the build cache belongs to user {status.st_uid}, not to you ({user}); {_WAY_OUT}"
        raise PermissionError(msg)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        msg = f"others can write to {path} in the build cache (mode {mode}); chmod go-w it, or {_WAY_OUT}"
        raise PermissionError(msg)


def digest(parts: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits that stand for ``parts``, whatever their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def obtain(file: Path, make: Callable[[Path], Path], *, rebuild: bool = False) -> Path:
    """Return a cached file, made first if it is not there; of several processes one makes it.

    ``make`` makes it in an empty folder and returns its path there. A file that is there is only read, so
    that a cache on a read-only file system serves. An OSError says why it cannot be kept or may not be used.
    """
    if not rebuild and _is_there(file):
        return file
    with FileLock(file.with_name(file.name + ".lock"), mode=0o600):  # the system frees it if we are killed
        if not rebuild and _is_there(file):  # another process was faster
            return file
        for left_over in file.parent.glob(f"{file.name}.tmp-*"):  # of builds that were killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=file.parent) as folder:
            made = make(Path(folder))
            made.chmod(0o600)
            made.replace(file)
    return file


def _is_there(file: Path) -> bool:
    if found := file.exists():
        _require_private(file.parent)
        _require_private(file)
    return found
