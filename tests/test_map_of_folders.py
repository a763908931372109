"""Does ARCHITECTURE.md name each folder and module of the package, so that a newcomer finds the right one?"""

import re
from pathlib import Path

import pytest

import amp_plugin

ROOT = Path(amp_plugin.__file__).parent
MAP = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_it_has_a_row_for_each_folder_and_no_other():
    rows = re.findall(r"^\| `(\w+)/` \|", MAP, re.MULTILINE)
    assert sorted(rows) == sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))


def test_it_has_a_row_for_each_module_of_the_root_and_no_other():
    rows = re.findall(r"^\| `(\w+\.py)` \|", MAP, re.MULTILINE)
    assert sorted(rows) == sorted(file.name for file in ROOT.glob("*.py") if not file.stem.startswith("__"))


@pytest.mark.parametrize("folder", ["scaling", "weights"])
def test_it_says_which_question_each_module_of_a_folder_answers(folder):
    table = MAP.split(f"| question about {folder} | file |")[1].partition("\n\n")[0]
    modules = {file.name for file in (ROOT / folder).glob("*.py") if file.stem != "__init__"}
    assert modules - {*re.findall(r"`(\w+\.py)`", table)} == set()


def test_it_is_short_enough_to_read():
    assert len(MAP.splitlines()) <= 250


def test_the_files_that_it_names_exist():
    named = re.findall(r"`(?:[\w/]*/)?(\w+\.(?:py|cpp|h))`", MAP)
    assert len(named) > 40
    assert {file for file in named if not [*ROOT.rglob(file)]} == set()
