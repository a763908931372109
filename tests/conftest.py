"""Settings that all tests share: one native core per process, and skips with a reason.

Markers: ``native`` needs the native core, ``gpu`` needs a CUDA device, ``one_graph`` needs a torch newer than
2.11. The Makefile runs tests marked ``dist`` and ``slow`` separately.
"""

import gc
import warnings
from pathlib import Path

import pytest
import torch

from amp_plugin.casting.rules import torch_release
from amp_plugin.kernels.build import native_core
from tests.copied_process import keep_copy

gc.disable()  # until the first test: imports create half a million objects and hardly any garbage


def pytest_report_header() -> str:
    core = _native_core()
    state = f"{core.library}, {core.seconds:.1f} s to compile" if core.loaded else f"fallback: {core.reason}"
    return f"torch {torch.__version__}, native core: {state}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    core = _native_core()
    without_core = pytest.mark.skip(reason=f"needs the native core: {core.reason}")
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    breaks = pytest.mark.skip(reason="torch 2.11 breaks the graph where a region is made")
    files = {item.path for item in items if item.get_closest_marker("dist")}
    # xdist does not divide these files between workers if they come first
    items.sort(key=lambda item: item.path not in files)
    for item in items:
        if item.get_closest_marker("native") and not core.loaded:
            item.add_marker(without_core)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without_gpu)
        if item.get_closest_marker("one_graph") and torch_release() == "2.11":
            item.add_marker(breaks)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If only tests marked ``gpu`` are requested, skip files without any: imports take longer than tests."""
    if not config.option.markexpr.startswith("gpu") or collection_path.suffix != ".py":
        return None
    files = (collection_path, collection_path.parent / "conftest.py")
    return None if any("pytest.mark.gpu" in file.read_text() for file in files if file.exists()) else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    gc.enable()
    if session.items and not session.config.option.collectonly:
        gc.collect()
        # later collections and forked copies then ignore the half a million objects of the frameworks
        gc.freeze()
        keep_copy()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, take what is left out of later collections, and out of ``gc.get_objects``.

    Skipped steps and ``diagnose`` look through all objects for modules. Without this, they would look through
    all that the tests before them have imported.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _native_core():
    with warnings.catch_warnings():
        # tests/kernels/test_build.py tests the warnings about a missing compiler
        warnings.simplefilter("ignore")
        return native_core()
