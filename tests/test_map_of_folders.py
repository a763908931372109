"""Does ARCHITECTURE.md name each folder and module of the package, so that a newcomer finds the right one?"""

import re
from pathlib import Path

import amp_plugin

ROOT = Path(amp_plugin.__file__).parent
MAP = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_it_has_a_row_for_each_folder_and_no_other():
    rows = re.findall(r"^\| `(\w+)/` \|", MAP, re.MULTILINE)
    assert sorted(rows) == sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))


def test_it_has_a_row_for_each_module_of_the_root_and_no_other():
    rows = re.findall(r"^\| `(\w+\.py)` \|", MAP, re.MULTILINE)
    assert sorted(rows) == sorted(file.name for file in ROOT.glob("*.py") if not file.stem.startswith("__"))


def test_the_files_that_it_names_exist():
    named = re.findall(r"`(?:[\w/]*/)?(\w+\.(?:py|cpp|h))`", MAP)
    assert len(named) > 40
    assert {file for file in named if not [*ROOT.rglob(file)]} == set()
