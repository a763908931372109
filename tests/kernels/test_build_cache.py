"""Only the user and root can write to the cache. Its files are complete, and old files are removed."""

import os
import time
from pathlib import Path

import pytest

from amp_plugin.kernels.build_cache import cache_root, digest, obtain, read_cached
from tests.warm_processes import WarmProcess


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch, tmp_path):
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
def test_where_it_is(environment, expected, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    root = cache_root()
    assert root == tmp_path / expected
    assert root.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o1777])
def test_a_folder_others_can_write_is_refused(mode):
    cache_root().chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode {mode:04o}\); chmod go-w it, or set AMP_PLUGIN"):
        cache_root()


@pytest.mark.parametrize("owner", [0, 4712])
def test_a_folder_of_root_or_of_the_user_is_read(owner, monkeypatch):
    root = cache_root()
    monkeypatch.setattr(os, "geteuid", lambda: 4712)
    status = os.stat_result([*root.stat()[:4], owner, *root.stat()[5:]])
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    assert cache_root() == root


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_of_someone_else_is_refused(linked, tmp_path, monkeypatch):
    root = cache_root()
    owner, me = 4711, 4712
    monkeypatch.setattr(os, "geteuid", lambda: me)
    status = os.stat_result([*root.stat()[:4], owner, *root.stat()[5:]])
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    if linked:
        (tmp_path / "link").symlink_to(root)
        monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", str(tmp_path / "link"))
    with pytest.raises(
        PermissionError, match=rf"user {owner}, neither to you \({me}\) nor to root; set AMP_PLUGIN_CACHE_DIR"
    ):
        cache_root()


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        ("relative/folder", ValueError, "'relative/folder' is not an absolute path"),
        ("~nobody-of-that-name/cache", ValueError, "'~nobody-of-that-name/cache' is not an absolute path"),
        ("{tmp}/file/below", OSError, r"file/below cannot be made \(Not a directory\)"),
        ("{tmp}/file", OSError, r"file cannot be made \(File exists\)"),
    ],
)
def test_what_cannot_be_the_folder(value, kind, error, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AMP_PLUGIN_CACHE_DIR", value.format(tmp=tmp_path))
    with pytest.raises(kind, match=f"{error}; set AMP_PLUGIN_CACHE_DIR"):
        cache_root()


def test_digest_depends_on_every_part_and_not_on_order():
    parts = {"torch": "2.13.0", "cpu": "x"}
    assert digest(parts) == digest({"cpu": "x", "torch": "2.13.0"})
    assert len({digest(parts), digest(parts | {"cpu": "y"}), digest({"torch": "2.13.0cpu", "": "x"})}) == 3


def write(folder):
    (folder / "made").write_text("whole")
    return folder / "made"


def test_it_is_made_once_and_others_may_read_it(tmp_path):
    file = tmp_path / "core.so"
    assert obtain(file, write) == file
    assert read_cached(file) == b"whole"
    assert file.stat().st_mode & 0o777 == 0o644
    assert obtain(file, lambda _: pytest.fail("made again")) == file
    assert read_cached(obtain(file, lambda _: pytest.fail("made again"))) == b"whole"
    assert read_cached(obtain(file, write, rebuild=True)) == b"whole"
    assert {path.name for path in tmp_path.iterdir()} == {"core.so", "core.so.lock"}


DAMAGE = {
    "cut short": lambda content: content[:3],
    "without its last byte": lambda content: content[:-1],
    "empty": lambda _: b"",
    "a block of zeros": lambda content: bytes(2) + content[2:],
    "of an older release": lambda _: b"whole",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again(damage, tmp_path):
    file = obtain(tmp_path / "core.so", write)
    file.write_bytes(damage(file.read_bytes()))
    assert read_cached(obtain(file, write)) == b"whole"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    file, events = tmp_path / "core.so", []
    monkeypatch.setattr(os, "fsync", lambda _: events.append(file.exists()))
    obtain(file, write)
    assert events == [False, True]  # first the file, then the folder


@pytest.mark.parametrize("there", ["damaged", "missing"])
def test_of_a_cache_that_cannot_be_written_to_it_is_said_what_is_wrong(there, tmp_path, monkeypatch):
    file = tmp_path / "core.so"
    if there == "damaged":
        file.write_text("cut")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=rf"core.so is {there} in the build cache .*amp-plugin build"):
        obtain(file, write)


def test_what_fails_leaves_nothing(tmp_path):
    def fail(folder):
        write(folder)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        obtain(tmp_path / "core.so", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["core.so.lock"]
    assert read_cached(obtain(tmp_path / "core.so", write)) == b"whole"


@pytest.mark.parametrize("writable", ["file", "folder"])
def test_what_others_can_write_to_is_refused(writable, tmp_path):
    file = obtain(tmp_path / "core.so", write)
    (file if writable == "file" else tmp_path).chmod(0o722)
    with pytest.raises(PermissionError, match=r"others can write to .* \(mode 0722\); chmod go-w it"):
        obtain(file, write)


def make_slowly(root, seconds):
    """Get a file from the cache. The process that creates it prints a line and takes some time."""

    def make(folder):
        with (root / "calls").open("a") as calls:
            calls.write("called\n")
        time.sleep(seconds)
        return write(folder)

    print(read_cached(obtain(root / "core.so", make)).decode())


def test_of_several_processes_one_makes_it(tmp_path):
    results = [process.wait(120) for process in [WarmProcess(make_slowly, tmp_path, 1.0) for _ in range(4)]]
    assert [(result.returncode, result.stdout) for result in results] == [(0, "whole\n")] * 4
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_killed_build_leaves_nothing_that_is_used_or_waited_for(tmp_path):
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
