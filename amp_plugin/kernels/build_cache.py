"""The build cache: a private folder of finished, checksummed shared objects.

An entry is a folder that holds one shared object and ``manifest.json`` with its
SHA-256. It is made beside its final place and renamed into it, so it is there
whole or not at all. A reader checks the checksum before the file is loaded: a
truncated shared object would take the process down with a bus error.

Loading a file from the cache runs its code, so the folder must belong to the
user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OURS = re.compile(r"[\w-]+(-[0-9a-f]{16}){1,2}(\.o|\.log|\.tmp-\w+)?")
_WAY_OUT = "set AMP_PLUGIN_CACHE_DIR to a folder of your own"
_ABANDONED_AFTER = 30 * 24 * 3600.0  # seconds


def cache_root() -> Path:
    """Return the private cache folder, made if there is none.

    It is ``$AMP_PLUGIN_CACHE_DIR``, else ``$XDG_CACHE_HOME/amp_plugin``, else
    ``~/.cache/amp_plugin``.

    Returns:
        An absolute path to a folder that only this user can write.

    Raises:
        ValueError: The environment names a relative path.
        PermissionError: The folder belongs to someone else or others can write to it.
        OSError: The folder cannot be made.
    """
    root = _configured_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        msg = f"the cache folder {root} cannot be made ({error.strerror}); {_WAY_OUT}"
        raise OSError(msg) from error
    if not stat.S_ISDIR(status.st_mode):
        msg = f"the cache folder {root} is not a folder; {_WAY_OUT}"
        raise NotADirectoryError(msg)
    _require_private(root, status)
    return root


def _configured_root() -> Path:
    for variable, suffix in (("AMP_PLUGIN_CACHE_DIR", ""), ("XDG_CACHE_HOME", "amp_plugin")):
        if value := os.environ.get(variable):
            path = Path(value)
            with contextlib.suppress(RuntimeError):  # no home folder: '~' stays and is refused below
                path = path.expanduser()
            if not path.is_absolute():
                msg = f"{variable}={value!r} is not an absolute path; give the full path of a private folder"
                raise ValueError(msg)
            return path / suffix
    try:
        return Path.home() / ".cache" / "amp_plugin"
    except RuntimeError as error:
        msg = f"there is no home folder for the build cache; {_WAY_OUT}"
        raise OSError(msg) from error


def _require_private(root: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        owner, user = status.st_uid, os.geteuid()
        msg = f"the cache folder {root} belongs to user {owner}, not to you ({user}); {_WAY_OUT}"
        raise PermissionError(msg)
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        msg = f"others can write to the cache folder {root} (mode {mode:04o}); chmod 700 it, or {_WAY_OUT}"
        raise PermissionError(msg)


def digest(parts: Mapping[str, str]) -> str:
    """Return 16 hexadecimal digits that stand for ``parts``, whatever their order."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def read_entry(entry: Path, file_name: str) -> Path | None:
    """Return the shared object of a cache entry if it is whole, else None.

    Args:
        entry: Folder of the entry.
        file_name: Name of the shared object in it.
    """
    shared_object = entry / file_name
    try:
        expected = json.loads((entry / MANIFEST).read_text())["sha256"]
        found = hashlib.sha256(shared_object.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return shared_object if found == expected else None


def publish_entry(built: Path, entry: Path, file_name: str, identity: Mapping[str, str]) -> Path:
    """Move a finished build into its place in one step; call it under `locked`.

    Args:
        built: Folder with the shared object, on the file system of ``entry``.
        entry: Where it belongs; a broken entry there is removed.
        file_name: Name of the shared object.
        identity: What the build depends on; written to the manifest for the reader's eye.

    Returns:
        Path of the shared object in its final place.
    """
    checksum = hashlib.sha256((built / file_name).read_bytes()).hexdigest()
    (built / MANIFEST).write_text(json.dumps({"sha256": checksum, "identity": dict(identity)}, indent=1))
    if entry.exists():
        shutil.rmtree(entry)
    built.replace(entry)
    return entry / file_name


@contextlib.contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Hold the inter-process lock of a cache entry; the system frees it if we are killed."""
    lock = FileLock(entry.with_name(entry.name + ".lock"), mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("amp_plugin: waiting for another process to compile", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def scratch_folder(entry: Path) -> Iterator[Path]:
    """Make a folder beside ``entry`` to build in; call it under `locked`.

    What killed builds of the same entry left behind is removed first.
    """
    for left_over in entry.parent.glob(f"{entry.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Delete what nobody used for a month: entries, objects and logs in ``folder``.

    Only names that this package gives: a user may have named a folder that holds other files.
    Locks stay, because unlinking one that is held would let two processes in.
    """
    oldest = time.time() - _ABANDONED_AFTER
    for path in (entry for entry in folder.iterdir() if _OURS.fullmatch(entry.name)):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
