"""The cache folder is private, its files are whole, and what is old goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from amp_plugin.kernels.build import cache_root, digest, obtain
from tests.warm_processes import WarmProcess


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AMP_PLUGIN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "home/.cache/amp_plugin"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/amp_plugin"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg", "AMP_PLUGIN_CACHE_DIR": "{tmp}/own"}, "own"),
        ({"AMP_PLUGIN_CACHE_DIR": "~/own"}, "home/own"),
        ({"AMP_PLUGIN_CACHE_DIR": ""}, "home/.cache/amp_plugin"),
    ],
)
def test_where_it_is(
    environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    root = cache_root()
    assert root == tmp_path / expected
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["relative/folder", "~nobody-of-that-name/cache"])
def test_a_relative_folder_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", value)
    with pytest.raises(
        ValueError, match=rf"the cache folder '{value}' is not an absolute path; set AMP_PLUGIN_CACHE_DIR"
    ):
        cache_root()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o1777])
def test_a_folder_others_can_write_is_refused(mode: int) -> None:
    cache_root().chmod(mode)
    with pytest.raises(
        PermissionError, match=rf"others can write to .*mode {mode:04o}\); chmod go-w it, or set AMP_PLUGIN"
    ):
        cache_root()


def test_a_folder_of_someone_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    root, me = cache_root(), os.geteuid()
    if me == 0:
        os.chown(root, 4321, -1)
        expected = r"belongs to user 4321, not to you \(0\); set AMP_PLUGIN_CACHE_DIR to a folder of your own"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        expected = (
            rf"belongs to user {me}, not to you \(4321\); set AMP_PLUGIN_CACHE_DIR to a folder of your own"
        )
    with pytest.raises(PermissionError, match=expected):
        cache_root()


def test_a_link_to_a_folder_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/usr" if os.geteuid() else _foreign_folder(tmp_path))
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(link))
    with pytest.raises(PermissionError, match="belongs to user"):
        cache_root()


def _foreign_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    folder.mkdir()
    os.chown(folder, 4321, -1)
    return folder


def test_a_file_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(
        OSError, match=r"file/below cannot be made \(Not a directory\); set AMP_PLUGIN_CACHE_DIR"
    ):
        cache_root()
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file cannot be made \(File exists\); set AMP_PLUGIN_CACHE_DIR"):
        cache_root()


def test_digest_depends_on_every_part_and_not_on_order() -> None:
    parts = {"torch": "2.13.0", "cpu": "x"}
    assert digest(parts) == digest({"cpu": "x", "torch": "2.13.0"})
    assert len({digest(parts), digest(parts | {"cpu": "y"}), digest({"torch": "2.13.0cpu", "": "x"})}) == 3


def write(folder: Path) -> Path:
    (folder / "made").write_text("whole")
    return folder / "made"


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "core.so"
    assert obtain(file, write) == file
    assert file.read_text() == "whole"
    assert file.stat().st_mode & 0o777 == 0o600
    assert obtain(file, lambda _: pytest.fail("made again")) == file
    assert {path.name for path in tmp_path.iterdir()} == {"core.so", "core.so.lock"}


def test_a_rebuild_makes_it_again(tmp_path: Path) -> None:
    (tmp_path / "core.so").write_text("old")
    assert obtain(tmp_path / "core.so", write, rebuild=True).read_text() == "whole"


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> Path:
        write(folder)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        obtain(tmp_path / "core.so", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["core.so.lock"]
    assert obtain(tmp_path / "core.so", write).read_text() == "whole"


@pytest.mark.parametrize("writable", ["file", "folder"])
def test_what_others_can_write_to_is_refused(writable: str, tmp_path: Path) -> None:
    file = obtain(tmp_path / "core.so", write)
    (file if writable == "file" else tmp_path).chmod(0o722)
    with pytest.raises(PermissionError, match=r"others can write to .* \(mode 0722\); chmod go-w it"):
        obtain(file, write)


def make_slowly(root: Path, seconds: float) -> None:
    """Obtain a file; whoever makes it says so and takes that long."""

    def make(folder: Path) -> Path:
        with (root / "calls").open("a") as calls:
            calls.write("called\n")
        time.sleep(seconds)
        return write(folder)

    print(obtain(root / "core.so", make).read_text())


def test_of_several_processes_one_makes_it(tmp_path: Path) -> None:
    results = [process.wait(120) for process in [WarmProcess(make_slowly, tmp_path, 1.0) for _ in range(4)]]
    assert [(result.returncode, result.stdout) for result in results] == [(0, "whole\n")] * 4
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_killed_build_leaves_nothing_that_is_used_or_waited_for(tmp_path: Path) -> None:
    process = WarmProcess(make_slowly, tmp_path, 600.0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists():
        assert time.monotonic() < deadline, process.errors()
        time.sleep(0.05)
    assert list(tmp_path.glob("*.tmp-*"))
    process.kill()
    done = WarmProcess(make_slowly, tmp_path, 0.0).wait(60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")
    assert not list(tmp_path.glob("*.tmp-*"))
