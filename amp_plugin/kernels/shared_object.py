"""Obtain a shared object: from the cache if it is whole and current, else by compiling.

The name of a cache entry is a hash of everything the result depends on: torch's
version, commit and C++ ABI, the CPU, the flags, Python's ABI where it matters and the
content of all sources, followed by a hash of the compiler. Without a compiler, an entry
of any compiler will do: that is how a machine image built ahead of time runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from amp_plugin.kernels.build_cache import (
    digest,
    locked,
    publish_entry,
    read_entry,
    remove_abandoned,
    scratch_folder,
)
from amp_plugin.kernels.compiler import (
    Compiler,
    SharedObject,
    compile_shared_object,
    cpu_identity,
    find_compiler,
    first_error,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A shared object that is ready to load.

    Attributes:
        path: The file, in the cache.
        seconds: Time spent compiling; 0.0 if it was in the cache.
    """

    path: Path
    seconds: float


def obtain(target: SharedObject, root: Path, *, rebuild: bool = False) -> Built:
    """Return ``target`` from the cache folder ``root``, compiled if it is not there.

    Args:
        target: What to obtain.
        root: The private cache folder.
        rebuild: Compile even if the cache has it.

    Raises:
        FileNotFoundError: The cache does not have it and there is no compiler, or no source.
        RuntimeError: Compilation failed; names the first error and the log.
    """
    if not target.sources:
        msg = (
            f"the C++ sources of {target.file_name} are missing from the installed package; install it again"
        )
        raise FileNotFoundError(msg)
    identity = _identity(target)
    stem = f"{target.file_name.partition('.')[0]}-{digest(identity)}"
    try:
        compiler = find_compiler()
    except FileNotFoundError:
        if path := _any_entry(root, stem, target.file_name):
            return Built(path=path, seconds=0.0)
        raise
    identity |= {"compiler": " ".join(compiler.command), "compiler version": compiler.version}
    entry = root / f"{stem}-{digest(identity)[:8]}"
    if not rebuild and (path := read_entry(entry, target.file_name)):
        os.utime(entry)
        return Built(path=path, seconds=0.0)
    asked = time.time()
    with locked(entry):
        if not rebuild:  # another process may have built it meanwhile
            if path := read_entry(entry, target.file_name):
                return Built(path=path, seconds=0.0)
            _raise_if_just_failed(entry, asked)
        return _build(compiler, target, entry, identity)


def _identity(target: SharedObject) -> dict[str, str]:
    """Return what the result depends on, the compiler apart."""
    return {
        "torch": torch.__version__,
        "torch commit": str(torch.version.git_version),
        "cpu": cpu_identity(),
        "compile flags": " ".join(target.compile_flags),
        "link flags": " ".join(flag for flag in target.link_flags if not _is_path(flag)),
        "file": target.file_name,  # a Python extension's name holds Python's ABI
        "sources": _content_hash((*target.sources, *target.headers)),
    }


def _is_path(flag: str) -> bool:
    return flag.startswith(("-L", "-Wl,-rpath", "/"))


def _content_hash(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        content.update(file.read_bytes())
    return content.hexdigest()


def _any_entry(root: Path, stem: str, file_name: str) -> Path | None:
    entries = (read_entry(entry, file_name) for entry in root.glob(f"{stem}-*") if entry.is_dir())
    return next((path for path in entries if path), None)


def _build(compiler: Compiler, target: SharedObject, entry: Path, identity: dict[str, str]) -> Built:
    """Compile under the entry's lock, print one line, publish the result."""
    _say(
        f"amp_plugin: compiling {target.file_name} ({len(target.sources)} files, torch {torch.__version__}) ..."
    )
    started = time.perf_counter()
    objects = _object_files(compiler, target, entry.parent)
    log = entry.with_name(entry.name + ".log")
    with scratch_folder(entry) as folder:
        try:
            messages = compile_shared_object(compiler, target, objects, folder)
        except RuntimeError as error:
            log.write_text(str(error))
            for file in objects.values():  # a damaged one must not fail the next build too
                file.unlink(missing_ok=True)
            _say(f" failed after {time.perf_counter() - started:.1f} s\n")
            raise RuntimeError(_failure(str(error), log)) from error
        log.write_text(messages)
        path = publish_entry(folder, entry, target.file_name, identity)
    seconds = time.perf_counter() - started
    _say(f" {seconds:.1f} s\n")
    remove_abandoned(entry.parent)
    remove_abandoned(entry.parent / "objects")
    return Built(path=path, seconds=seconds)


def _object_files(compiler: Compiler, target: SharedObject, root: Path) -> dict[Path, Path]:
    """Return source to object file; unchanged files keep theirs when another one changes."""
    folder = root / "objects"
    folder.mkdir(mode=0o700, exist_ok=True)
    common = _identity(target) | {
        "compiler": " ".join(compiler.command),
        "compiler version": compiler.version,
    }
    common["link flags"] = ""
    objects = {}
    for source in target.sources:
        key = digest(common | {"sources": _content_hash((source, *target.headers))})
        objects[source] = folder / f"{source.stem}-{key}.o"
    return objects


def _failure(log_text: str, log: Path) -> str:
    return f"compiling it failed: {first_error(log_text)} (full log: {log})"


def _raise_if_just_failed(entry: Path, asked: float) -> None:
    """Do not repeat a build that failed in another process while this one waited for it."""
    log = entry.with_name(entry.name + ".log")
    if log.exists() and log.stat().st_mtime >= asked:
        raise RuntimeError(_failure(log.read_text(), log))


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
