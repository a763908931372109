"""Obtain a shared object: from the cache if it is whole and current, else by compiling.

The name of a cache entry is a hash of everything the result depends on: torch's
version, commit and C++ ABI, the CPU, the flags, Python's ABI where it matters and the
content of all sources; then a hash of the compiler. Without a compiler, an entry of any
compiler will do: that is how a machine image that was built ahead of time runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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
    Unit,
    compile_objects,
    compile_shared_object,
    find_compiler,
    first_error,
    included_headers,
    jobs,
)
from amp_plugin.kernels.progress import Progress
from amp_plugin.kernels.torch_flags import cpu_identity

_NAMES_CLASH = re.compile(r"error: .*(redefinition of|ambiguous)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A shared object that is ready to load.

    Attributes:
        path: The file, in the cache.
        seconds: Time spent compiling; 0.0 if it was in the cache.
    """

    path: Path
    seconds: float


def obtain(
    target: SharedObject, root: Path, *, rebuild: bool = False, beside: SharedObject | None = None
) -> Built:
    """Return ``target`` from the cache folder ``root``, compiled if it is not there.

    Args:
        target: What to obtain.
        root: The private cache folder.
        rebuild: Compile even if the cache has it.
        beside: Another shared object, to be obtained next. If ``target`` is compiled, its sources are too,
            at the same time, and then it is only linked.

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
        return _build(compiler, target, entry, beside)


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
        "vector flags": " ".join(target.vector_flags),
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


def _build(compiler: Compiler, target: SharedObject, entry: Path, beside: SharedObject | None) -> Built:
    """Compile under the entry's lock, show that it runs, publish the result."""
    name, sources = entry.name.partition("-")[0], len(target.sources)
    progress = Progress(f"amp_plugin: compiling {name} ({sources} files, once) ...", sys.stderr)
    with scratch_folder(entry) as folder:
        try:
            with progress:
                messages = _compile_beside(compiler, target, beside, entry.parent, folder)
        except RuntimeError as error:
            _log(entry).write_text(str(error))
            raise RuntimeError(_failure(entry)) from error
        _log(entry).write_text(messages)
        path = publish_entry(
            folder, entry, target.file_name, _identity(target) | _compiler_identity(compiler)
        )
    remove_abandoned(entry.parent)
    remove_abandoned(entry.parent / "objects")
    return Built(path=path, seconds=progress.seconds)


def _compile_beside(
    compiler: Compiler, target: SharedObject, beside: SharedObject | None, root: Path, folder: Path
) -> str:
    """Compile and link ``target``, and compile the sources of ``beside`` at the same time."""
    objects = _object_files(compiler, target, root)
    with ThreadPoolExecutor(1) as thread:
        if beside is not None and jobs() > 1:
            ahead = (compiler, beside, _object_files(compiler, beside, root), folder)
            thread.submit(compile_objects, *ahead)  # where it fails, obtaining it does so again, and says so
        try:
            return _compile(compiler, target, objects, folder)
        except RuntimeError as error:
            if not (target.joined and _NAMES_CLASH.search(str(error))):
                raise
    sys.stderr.write(" names of two sources clash, each is compiled by itself ...")
    separate = dataclasses.replace(target, joined=False)
    return _compile(compiler, separate, _object_files(compiler, separate, root), folder)


def _object_files(compiler: Compiler, target: SharedObject, root: Path) -> dict[Unit, Path]:
    """Return unit to object file; an unchanged unit keeps its object when another one changes."""
    folder = root / "objects"
    folder.mkdir(mode=0o700, exist_ok=True)
    common = _compilation_identity(target) | _compiler_identity(compiler)
    objects = {}
    for unit in target.units():
        files = [
            file for source in unit.sources for file in (source, *included_headers(source, target.headers))
        ]
        objects[unit] = folder / f"{unit.name}-{digest(common | {'sources': _content_hash(files)})}.o"
    return objects


def _compile(compiler: Compiler, target: SharedObject, objects: dict[Unit, Path], folder: Path) -> str:
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
