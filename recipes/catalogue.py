"""List, load and run the recipes by name."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from amp_plugin.messages import did_you_mean

FOLDER = Path(__file__).resolve().parent
NAMES = (
    "gradient_penalty",
    "gradient_penalty_lightning",
    "several_losses",
    "typical_training",
    "clipping",
    "accumulation",
    "wgan_gp",
    "wgan_gp_lightning",
    "wgan_gp_accelerate",
    "several_models",
    "several_models_accelerate",
    "custom_functions",
    "fp32_module",
    "diagnose",
    "threads",
    "ddp",
    "fsdp2",
    "fsdp2_exact_bf16",
    "lbfgs",
    "compiled",
    "cuda_graph",
    "char_gpt",
    "stored_weights",
    "compressed_state",
    "below_16_bits",
    "inference",
)  # fmt: skip
FRAMEWORKS = ("_lightning", "_accelerate")  # suffixes of the Lightning and Accelerate versions of recipes


def plain_name(name: str) -> str:
    """Return the name without its framework. All forms of a recipe share one config."""
    for end in FRAMEWORKS:
        name = name.removesuffix(end)
    return name


def about(name: str) -> str:
    """Return the first line of a recipe's docstring, without importing the recipe.

    Args:
        name: One of ``NAMES``.
    """
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(source))).splitlines()[0]


def load(name: str) -> ModuleType:
    """Import the module of a recipe, which defines ``Config`` and ``train(config)``.

    Args:
        name: One of ``NAMES``.

    Raises:
        ValueError: There is no recipe with this name.
    """
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or ";"
        msg = f"no recipe {name!r}{hint} python -m recipes list shows all: {', '.join(NAMES)}"
        raise ValueError(msg)
    return importlib.import_module(f"recipes.{name}")


def run(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a recipe as a program that prints a table of results and writes ``result.json`` and plots.

    Args:
        name: One of ``NAMES``.
        arguments: ``[--config FILE] [key=value ...]``. None means the command-line arguments of this process.

    Raises:
        SystemExit: The config is not valid, or this machine lacks something that the recipe needs.
    """
    # This import is here, because listing the recipes must also work if omegaconf is not installed.
    from recipes.config import config_errors, config_from_command_line, make_folder  # noqa: PLC0415

    recipe = load(name)
    program = f"python -m recipes run {name}"
    config = config_from_command_line(
        recipe.Config,
        default=f"configs/{plain_name(name)}.yaml",
        about=about(name),
        arguments=arguments,
        program=program,
    )
    with config_errors(program):
        folder = make_folder(config.output, f"{name}_{config.precision.value}")
        record = recipe.train(config)
    if int(os.environ.get("RANK", "0")):  # under torchrun only rank 0 prints results
        return
    record.show(folder)
