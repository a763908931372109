"""Runs recipes in existing processes, as from the command line and as torchrun starts them."""

import json
import os
import runpy
import sys

from recipes import catalogue
from recipes.config import ROOT, load_config


def on_the_command_line(words: list[str]) -> None:
    """Run ``python -m recipes`` with arguments."""
    os.environ["COLUMNS"] = "150"
    sys.argv[1:] = words
    runpy.run_module("recipes", run_name="__main__", alter_sys=True)


def train_and_print(name: str, overrides: list[str]) -> None:
    """Train a recipe. Print its title and losses as one line of JSON."""
    config = load_config(catalogue.load(name).Config, ROOT / f"configs/{name}.yaml", overrides)
    record = catalogue.load(name).train(config)
    print(json.dumps([record.title, record.losses]))


def digits_as_script_and_as_module(words: list[str]) -> None:
    """Run ``python recipes/train_digits.py WORDS``, then the same with ``-m``."""
    for name, run, program in (
        ("script", runpy.run_path, "recipes/train_digits.py"),
        ("module", runpy.run_module, "recipes.train_digits"),
    ):
        sys.argv = ["train_digits.py", *words, f"name={name}"]
        run(program, run_name="__main__")
