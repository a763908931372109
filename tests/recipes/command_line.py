"""The recipes in processes that run already: on their command line, and as torchrun starts them."""

from __future__ import annotations

import json
import os
import runpy
import sys

from recipes import catalogue
from recipes.config import ROOT, load_config


def on_the_command_line(words: list[str]) -> None:
    """Do what ``python -m recipes WORDS`` does."""
    os.environ["COLUMNS"] = "150"
    sys.argv[1:] = words
    runpy.run_module("recipes", run_name="__main__", alter_sys=True)


def train_on_rank(rank: int, ranks: int, port: int, name: str, overrides: list[str]) -> None:
    """Train a recipe as one of torchrun's processes; print its title and losses as a line of JSON."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = load_config(catalogue.load(name).Config, ROOT / f"configs/{name}.yaml", overrides)
    record = catalogue.load(name).train(config)
    print(json.dumps([record.title, record.losses]))
