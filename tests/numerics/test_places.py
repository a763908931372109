"""The line of a program that an op was called from, in a file and in a notebook."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from amp_plugin.numerics.places import Place, called_from


def called_in(file: str) -> Place | None:
    """Where a call comes from that stands in line 2 of a file."""
    defined = {"called_from": called_from}
    exec(compile("def step():\n    return called_from()\n", file, "exec"), defined)
    return defined["step"]()[0]


@pytest.fixture
def cells(monkeypatch):
    """IPython's names of cells: file -> number; its shell has no other part that is asked."""
    numbers: dict[str, int] = {}

    def format_code_name(file: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{numbers[file]}]") if file in numbers else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return numbers


@pytest.mark.parametrize("file", ["/tmp/ipykernel_7/123.py", "<ipython-input-3-0a1b>"])
def test_a_cell_is_named_as_ipython_names_it(cells, file):
    cells[file] = 3
    assert str(called_in(file)) == "Cell In[3], line 2 in step"


def test_a_file_imported_in_a_notebook_is_named_by_its_path(cells):
    assert str(called_in(str(Path.cwd() / "train.py"))) == "train.py:2 in step"


@pytest.mark.parametrize(
    "ipython",
    [
        SimpleNamespace(get_ipython=lambda: None),
        SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=object())),
    ],
    ids=["imported by a script", "older than 8"],
)
def test_without_names_the_file_is_shown(monkeypatch, ipython):
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert str(called_in("/elsewhere/train.py")) == "/elsewhere/train.py:2 in step"
    assert str(called_in("<ipython-input-3-0a1b>")) == "<ipython-input-3-0a1b>:2 in step"
