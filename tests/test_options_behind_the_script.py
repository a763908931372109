"""An option after the script belongs to the script, unless the script reads no arguments.

A printed line says so.
"""

from pathlib import Path

import pytest

from amp_plugin.program import reads_arguments
from tests.commands import amp

READS = "import sys, torch\nprint('given', sys.argv[1:])"
READS_NONE = "import torch\nprint('ran')"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ["--precision", "fp16"]),
        ("casts", ["--every"]),
        ("casts", ["--by=op"]),
        ("diagnose", ["--keep-going"]),
        ("diagnose", ["--compare", "fp32"]),
        ("report", ["--page", "a.html"]),
    ],
)
def test_it_goes_to_a_script_that_reads_arguments(command: str, options: list[str]) -> None:
    Path("train.py").write_text(READS)
    answer = amp(command, "train.py", "1", *options)
    assert f"given {['1', *options]}" in answer.stdout
    name = options[0]
    (line,) = [line for line in answer.stderr.splitlines() if name in line]
    assert line.startswith(
        f"amp-plugin {command}: {name} stands after train.py, so train.py gets it; to give it to"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--help"],
        ["train.py", "--lr", "1"],
        ["train.py", "--", "--every"],
        ["--every", "train.py", "1"],
    ],
)
def test_nothing_is_said_of_the_scripts_own(words: list[str]) -> None:
    Path("train.py").write_text(READS)
    answer = amp("casts", *words)
    behind = words[words.index("train.py") + 1 :]
    assert f"given {[word for word in behind if word != '--']}" in answer.stdout.replace("'--', ", "")
    assert "amp-plugin casts:" not in answer.stderr


@pytest.mark.parametrize(
    ("words", "told"), [(["--by", "op"], ""), (["--by=op"], ""), (["--by=op", "--every"], "--every ")]
)
def test_nothing_is_said_of_an_option_that_the_script_has_too(words: list[str], told: str) -> None:
    Path("train.py").write_text(f"{READS}\nOPTIONS = ['--by']")
    answer = amp("casts", "train.py", *words)
    assert f"given {words}" in answer.stdout
    lines = [line for line in answer.stderr.splitlines() if line.startswith("amp-plugin casts:")]
    assert [line.startswith(f"amp-plugin casts: {told}stands after") for line in lines] == [True] * bool(told)


def test_it_is_ours_behind_a_script_that_reads_none() -> None:
    Path("train.py").write_text(f"{READS_NONE}\nTEXT = '--json'")
    answer = amp("casts", "train.py", "--json", "--unknown", "x")
    assert answer.stdout.startswith('{"script": "train.py"')
    assert (
        "amp-plugin casts: --json is an option of amp-plugin casts, because train.py reads no arguments"
        in answer.stderr
    )


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import torch", False),
        ("import os.path, json\nfrom torch import nn\nimport numpy as np\nimport amp_plugin", False),
        ("import sys\nsys.exit(0)", False),
        ("import sys\nprint(sys.argv)", True),
        ("from sys import argv as words", True),
        ("import sys\nprint(sys.orig_argv)", True),
        ("import argparse", True),
        ("import hydra", True),
        ("from helper import main\nmain()", True),
        ("from . import helper", True),
        ("__import__('argparse')", True),
        ("exec(open('x').read())", True),
        ("def :", True),
    ],
)
def test_what_surely_reads_no_arguments(source: str, reads: bool) -> None:
    Path("train.py").write_text(source)
    assert reads_arguments("train.py") is reads
