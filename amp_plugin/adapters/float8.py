"""Linear layers in float8, by torchao's training: which layers, on which devices, with what error."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

_SIDE = 16  # elements: what float8 matrix products need each side of a weight to be a multiple of
_INSTEAD = "use 'bf16' instead"


def checked_config(owner: str, given: Any) -> Any:
    """Return torchao's Float8LinearConfig: the one given, of a recipe's name, or its default for None."""
    if importlib.util.find_spec("torchao") is None:
        remedy = f"run: pip install 'torchao>=0.18', or {_INSTEAD}"
        msg = f"{owner} needs torchao, which is not installed; {remedy}"
        raise ImportError(msg)
    from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 -- only float8 users pay for it
    from torchao.float8.config import Float8LinearRecipeName  # noqa: PLC0415

    if given is None or isinstance(given, Float8LinearConfig):
        return given or Float8LinearConfig()
    recipes = [recipe.value for recipe in Float8LinearRecipeName]
    if given in recipes:
        return Float8LinearConfig.from_recipe_name(given)
    msg = (
        f"{owner}: float8_config={given!r} is not allowed; give a torchao.float8.Float8LinearConfig or the "
        f"name of a recipe: {', '.join(map(repr, recipes))}"
    )
    raise ValueError(msg)


def refuse_device(owner: str, device_type: str, config: Any) -> None:
    """Raise ValueError if a device has no float8 arithmetic and torchao is not told to emulate it."""
    is_there = device_type == "cuda" and torch.cuda.is_available()
    has_float8 = is_there and (torch.version.hip or torch.cuda.get_device_capability() >= (8, 9))
    if config.emulate or has_float8:
        return
    msg = (
        f"{owner}: this {device_type} has no float8 arithmetic (NVIDIA GPUs have it from compute capability "
        f"8.9 on: Ada, Hopper); {_INSTEAD}, or try it out slowly with "
        "torchao.float8.Float8LinearConfig(emulate=True)"
    )
    raise ValueError(msg)


def convert_linear_layers(model: nn.Module, config: Any, *, left_out: Collection[str]) -> nn.Module:
    """Let torchao turn Linear layers into float8 ones, once and in place, except in modules ``left_out``."""
    from torchao.float8 import convert_to_float8_training  # noqa: PLC0415 -- only float8 users pay for it
    from torchao.float8.float8_linear import Float8Linear  # noqa: PLC0415

    def is_converted(module: nn.Module, name: str) -> bool:
        return may_be_float8(module) and not _is_within(name, left_out) and type(module) is not Float8Linear

    if any(type(module) is Float8Linear for module in model.modules()):
        return model
    if not any(is_converted(module, name) for name, module in model.named_modules()):
        msg = (
            f"precision='fp8': {type(model).__name__} has no Linear layer to compute in float8: both sides "
            f"must be multiples of {_SIDE}, and fp32_modules are left out; {_INSTEAD}"
        )
        raise ValueError(msg)
    converted: nn.Module = convert_to_float8_training(model, module_filter_fn=is_converted, config=config)
    return converted


def may_be_float8(module: nn.Module) -> bool:
    """Whether a module is a Linear layer whose sides float8 matrix products take."""
    return isinstance(module, nn.Linear) and not (module.in_features % _SIDE or module.out_features % _SIDE)


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def leave_out(recipe: Any, model: nn.Module, names: Collection[str]) -> None:
    """Let Accelerate's AORecipeKwargs leave these out too; without a filter, the first and last Linear."""
    own = recipe.module_filter_func
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    outermost = {layers[0], layers[-1]} if layers and own is None else set()

    def filtered(module: nn.Module, name: str) -> bool:
        wanted = may_be_float8(module) and name not in outermost if own is None else own(module, name)
        return bool(wanted) and not _is_within(name, names)

    recipe.module_filter_func = filtered
