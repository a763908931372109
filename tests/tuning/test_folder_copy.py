"""A tuned program overwrites no files: it runs in a copy of its folder, which is restored before each run."""

import os
from pathlib import Path

import pytest

from amp_plugin.tuning import folder_copy
from amp_plugin.tuning.folder_copy import FolderCopy
from tests.commands import amp

LARGE = b"x" * 1_200_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a project with typical files, and data outside of it."""
    project, data = tmp_path / "project", tmp_path / "data"
    for place in (project / "runs" / "1", project / ".cache", project / "venv", data):
        place.mkdir(parents=True)
    (project / "model.pt").write_bytes(LARGE)
    (project / "runs" / "1" / "log.txt").write_text("first")
    (project / "runs" / "last").symlink_to("1")
    (project / ".cache" / "vocabulary").write_text("words")
    (project / "venv" / "pyvenv.cfg").touch()
    (data / "images").write_bytes(LARGE)
    (project / "data").symlink_to(data)
    (project / "images").symlink_to(data / "images")
    (project / "above").symlink_to("..")
    (project / "gone").symlink_to("nowhere")
    os.mkfifo(project / "pipe")
    monkeypatch.chdir(project)
    return project


def contents(*folders: Path) -> dict[str, bytes]:
    return {
        str(file): file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()
    }


def write_over_everything() -> None:
    for name in (
        "model.pt",
        "runs/1/log.txt",
        "runs/last/log.txt",
        ".cache/vocabulary",
        "data/images",
        "images",
    ):
        with Path(name).open("r+b") as file:  # also through a link
            file.write(b"over")
    Path("gone").write_text("new")
    Path("new").write_text("new")


@pytest.mark.parametrize("clones", [True, False], ids=["if it can", "copies"])
def test_what_a_program_writes_reaches_no_file_of_the_folder(folder, clones, monkeypatch):
    if not clones:
        monkeypatch.setattr(folder_copy, "_clone", lambda *_: False)
    before, copy = contents(folder, folder.parent / "data"), FolderCopy(folder)
    for _ in range(2):
        with copy.entered():
            assert Path.cwd() != folder
            assert os.environ["PWD"] == str(Path.cwd())
            names = {"model.pt", "runs", ".cache", "data", "images", "gone"}
            assert {path.name for path in Path().iterdir()} == names
            assert Path("model.pt").read_bytes() == LARGE == Path("data/images").read_bytes()
            assert Path("runs/last/log.txt").read_text() == "first"
            write_over_everything()
            place = Path.cwd()
        assert contents(folder, folder.parent / "data") == before
    copy.close()
    assert not place.exists()
    assert Path.cwd() == folder


CHANGES = {
    "a file removed": lambda: Path("model.pt").unlink(),
    "a file of the same size and time": lambda: (Path("model.pt").write_bytes(bytes(len(LARGE))), os.utime("model.pt", ns=(5, 5))),
    "a folder for a file": lambda: (Path("model.pt").unlink(), Path("model.pt").mkdir(), Path("model.pt/x").touch()),
    "a file for a folder": lambda: (Path("runs/1/log.txt").unlink(), Path("runs/1").rmdir(), Path("runs/1").touch()),
    "a link to the original": lambda: (Path("model.pt").unlink(), Path("model.pt").symlink_to(Path("../../project/model.pt"))),
    "a link for a folder": lambda: (Path("runs").rename("old"), Path("runs").symlink_to("old")),
    "another link": lambda: (Path("runs/last").unlink(), Path("runs/last").symlink_to("nowhere")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_run_finds_the_folder_as_it_was(folder, change):
    copy = FolderCopy(folder)
    with copy.entered():
        wanted = contents(Path())
        change()
    with copy.entered():
        assert contents(Path()) == wanted
        assert Path("runs/last").readlink() == Path("1")
    copy.close()


@pytest.mark.parametrize(("limit", "value"), [("_MOST_BYTES", 1_000_000), ("_MOST_FILES", 3)])
def test_a_folder_that_is_too_large_is_refused_before_anything_runs(folder, limit, value, monkeypatch):
    monkeypatch.setattr(folder_copy, "_clone", lambda *_: False)
    monkeypatch.setattr(folder_copy, limit, value)
    copy = FolderCopy(folder)
    with pytest.raises(RuntimeError, match=r"would hold .*counted up to .*TMPDIR"), copy.entered():
        pytest.fail("it ran")
    copy.close()
    assert Path.cwd() == folder


def test_what_is_cloned_has_no_limit(folder, monkeypatch):
    monkeypatch.setattr(
        folder_copy, "_clone", lambda source, target: bool(target.write_bytes(source.read_bytes())) or True
    )
    monkeypatch.setattr(folder_copy, "_MOST_BYTES", 10)
    copy = FolderCopy(folder)
    with copy.entered():
        assert Path("model.pt").read_bytes() == LARGE
    copy.close()


SCRIPT = """
import pathlib, torch
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
here = pathlib.Path(__file__).parent
try:
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 8)).float().square().mean()
        loss.backward()
finally:
    for place in (here / "model.pt", pathlib.Path("model.pt")):
        torch.save(model.state_dict(), place)
"""


@pytest.mark.parametrize("by_full_path", [True, False])
def test_a_checkpoint_that_a_script_saves_at_its_end_is_not_lost(tmp_path, monkeypatch, by_full_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "model.pt").write_bytes(LARGE)
    monkeypatch.chdir(tmp_path)
    answer = amp("tune", "--batches", 1, "--device", "cpu", script if by_full_path else script.name)
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "model.pt").read_bytes() == LARGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "rules.yaml", "train.py"]
