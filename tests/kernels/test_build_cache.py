"""The cache folder is private, its entries are whole, what is old goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amp_plugin.kernels import build_cache
from amp_plugin.kernels.build_cache import cache_root, digest, remove_abandoned


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
        ValueError, match=rf"AMP_PLUGIN_CACHE_DIR='{value}' is not an absolute path; give the full path"
    ):
        cache_root()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o1777])
def test_a_folder_others_can_write_is_refused(mode: int) -> None:
    cache_root().chmod(mode)
    with pytest.raises(
        PermissionError, match=rf"others can write to .*mode {mode:04o}\); chmod 700 it, or set AMP_PLUGIN"
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


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(build_cache.Path, "home", no_home)
    with pytest.raises(OSError, match="no home folder for the build cache; set AMP_PLUGIN_CACHE_DIR"):
        cache_root()


def test_digest_depends_on_every_part_and_not_on_order() -> None:
    parts = {"torch": "2.13.0", "cpu": "x"}
    assert digest(parts) == digest({"cpu": "x", "torch": "2.13.0"})
    assert len({digest(parts), digest(parts | {"cpu": "y"}), digest({"torch": "2.13.0cpu", "": "x"})}) == 3


def test_what_nobody_used_for_a_month_goes(tmp_path: Path) -> None:
    old = build_cache.time.time() - 31 * 24 * 3600
    one, two = "0123456789abcdef", "fedcba9876543210"
    kept = [
        f"new-{one}-{two}",
        f"new-{one}.log",
        f"old-{one}.lock",
        "thesis.log",
        "photos",
        f"photos-{one[:8]}",
    ]
    gone = [
        f"old-sm_90-{two}",
        f"old-{one}-{two}",
        f"old-{one}.log",
        f"old-{one}.o",
        f"old-{one}-{two}.tmp-a1_b2",
    ]
    for name in kept + gone:
        if "." in name and ".tmp-" not in name:
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "library.so").touch()
        if not name.startswith("new"):
            os.utime(tmp_path / name, (old, old))
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept}
