"""The recipes' command line in a process that runs already."""

from __future__ import annotations

import os
import runpy
import sys


def on_the_command_line(words: list[str]) -> None:
    """Do what ``python -m recipes WORDS`` does."""
    os.environ["COLUMNS"] = "150"
    sys.argv[1:] = words
    runpy.run_module("recipes", run_name="__main__", alter_sys=True)
