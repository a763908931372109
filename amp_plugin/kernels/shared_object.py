"""Obtain a shared object: from the cache if it is whole and current, else by compiling.

The name of a cache entry is a hash of everything the result depends on: torch's
version, commit and C++ ABI, the CPU, the flags, Python's ABI where it matters and the
content of all sources; then a hash of the compiler. Without a compiler, an entry of any
compiler will do: that is how a machine image that was built ahead of time runs.
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
    find_compiler,
    first_error,
    included_headers,
)
from amp_plugin.kernels.torch_flags import cpu_identity


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
        name = target.file_name
        msg = f"the C++ sources of {name} are missing from the installed package; install amp-plugin again"
        raise FileNotFoundError(msg)
    stem = f"{target.file_name.partition('.')[0]}-{digest(_identity(target))}"
    try:
        compiler = find_compiler()
    except FileNotFoundError:
        if path := _entry_of_any_compiler(root, stem, target.file_name):
            return Built(path=path, seconds=0.0)
        raise
    entry = root / f"{stem}-{digest(_compiler_identity(compiler))}"
    if not rebuild and (path := read_entry(entry, target.file_name)):
        os.utime(entry)
        return Built(path=path, seconds=0.0)
    asked = time.time()
    with locked(entry):
        if not rebuild:
            if path := read_entry(entry, target.file_name):  # another process was faster
                return Built(path=path, seconds=0.0)
            _raise_if_failed_since(asked, entry)
        return _build(compiler, target, entry)


def _identity(target: SharedObject) -> dict[str, str]:
    """Return all that the result depends on, but for the compiler and paths."""
    flags = [flag for flag in target.link_flags if not flag.startswith(("-L", "-Wl,-rpath", "/"))]
    return {
        "file": target.file_name,  # a Python extension's name holds Python's ABI
        "sources": _content_hash((*target.sources, *target.headers)),
        "link flags": " ".join(flags),
        **_compilation_identity(target),
    }


def _compilation_identity(target: SharedObject) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "torch commit": str(torch.version.git_version),
        "cpu": cpu_identity(),
        "compile flags": " ".join(target.compile_flags),
    }


def _compiler_identity(compiler: Compiler) -> dict[str, str]:
    return {"compiler": " ".join(compiler.command), "compiler version": compiler.version}


def _content_hash(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        content.update(f"{file.name}\0{len(text)}\0".encode() + text)
    return content.hexdigest()


def _entry_of_any_compiler(root: Path, stem: str, file_name: str) -> Path | None:
    paths = (read_entry(entry, file_name) for entry in sorted(root.glob(f"{stem}-*")) if entry.is_dir())
    return next((path for path in paths if path), None)


def _build(compiler: Compiler, target: SharedObject, entry: Path) -> Built:
    """Compile under the entry's lock, print one line, publish the result."""
    _say(f"amp_plugin: compiling {entry.name.partition('-')[0]} ({len(target.sources)} files, once) ...")
    started = time.perf_counter()
    objects = _object_files(compiler, target, entry.parent)
    with scratch_folder(entry) as folder:
        try:
            messages = _compile(compiler, target, objects, folder)
        except RuntimeError as error:
            _log(entry).write_text(str(error))
            _say(f" failed after {time.perf_counter() - started:.1f} s\n")
            raise RuntimeError(_failure(entry)) from error
        _log(entry).write_text(messages)
        path = publish_entry(
            folder, entry, target.file_name, _identity(target) | _compiler_identity(compiler)
        )
    seconds = time.perf_counter() - started
    _say(f" {seconds:.1f} s\n")
    remove_abandoned(entry.parent)
    remove_abandoned(entry.parent / "objects")
    return Built(path=path, seconds=seconds)


def _object_files(compiler: Compiler, target: SharedObject, root: Path) -> dict[Path, Path]:
    """Return source to object file; an unchanged source keeps its object when another one changes."""
    folder = root / "objects"
    folder.mkdir(mode=0o700, exist_ok=True)
    common = _compilation_identity(target) | _compiler_identity(compiler)
    objects = {}
    for source in target.sources:
        key = digest(common | {"sources": _content_hash((source, *included_headers(source, target.headers)))})
        objects[source] = folder / f"{source.stem}-{key}.o"
    return objects


def _compile(compiler: Compiler, target: SharedObject, objects: dict[Path, Path], folder: Path) -> str:
    """Compile and link; if that fails with kept objects, once more without: they may be damaged."""
    kept = [file for file in objects.values() if file.exists()]
    try:
        return compile_shared_object(compiler, target, objects, folder)
    except RuntimeError:
        if not kept:
            raise
    for file in kept:
        file.unlink(missing_ok=True)
    return compile_shared_object(compiler, target, objects, folder)


def _log(entry: Path) -> Path:
    return entry.with_name(entry.name + ".log")


def _failure(entry: Path) -> str:
    return f"compiling it failed: {first_error(_log(entry).read_text())} (full log: {_log(entry)})"


def _raise_if_failed_since(asked: float, entry: Path) -> None:
    """Do not repeat a build that failed in another process while this one waited for it."""
    if _log(entry).exists() and _log(entry).stat().st_mtime >= asked:
        raise RuntimeError(_failure(entry))


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
