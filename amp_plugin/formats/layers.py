"""Chooses a format for each Linear layer, and converts the layers with torchao.

The first pattern in ``formats`` that matches a layer decides the layer's format. If no pattern matches, the
layer gets the default format. Layers in ``fp32_modules`` stay in fp32. Layers with sizes that a format does
not support stay in 16 bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor, nn

from amp_plugin.formats.quantizers import BLOCK, EmulatedLinear
from amp_plugin.hardware import NEEDS, default_device, hardware_of
from amp_plugin.messages import OptionError, did_you_mean
from amp_plugin.patterns import clean_name, matched_modules, require_matches

_INSTEAD: Final = "use 'bf16' instead"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format below 16 bits for training Linear layers with torchao.

    Attributes:
        side: A number that must divide the layer's ``in_features`` and ``out_features``.
        rows: A number that must divide the number of input rows (batch size times sequence length) in
            training.
        config: A function that returns torchao's configuration, given a recipe (or None) and ``emulate``.
        convert: A function that returns torchao's layer, given a Linear layer and a configuration. The
            parameters stay the same objects.
    """

    side: int
    rows: int
    config: Callable[[Any, bool], Any]
    convert: Callable[[nn.Linear, Any], nn.Module]


def _float8_config(recipe: Any, emulate: bool) -> Any:
    from torchao.float8 import Float8LinearConfig  # noqa: PLC0415 - optional
    from torchao.float8.config import Float8LinearRecipeName  # noqa: PLC0415

    names = [name.value for name in Float8LinearRecipeName]
    if recipe is None or recipe in names:
        recipe = Float8LinearConfig.from_recipe_name(recipe or "tensorwise")
    if not isinstance(recipe, Float8LinearConfig):
        _refuse_recipe(recipe, "a torchao.float8.Float8LinearConfig", names)
    return replace(recipe, emulate=True) if emulate else recipe


def _mxfp8_config(recipe: Any, emulate: bool) -> Any:
    from torchao.prototype.moe_training.config import (  # noqa: PLC0415 - optional
        MXFP8TrainingOpConfig,
        MXFP8TrainingRecipe,
    )
    from torchao.quantization.quantize_.common import KernelPreference  # noqa: PLC0415

    names = [name.value for name in MXFP8TrainingRecipe]
    if recipe is None or recipe in names:
        recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe(recipe or "mxfp8_rceil"))
    if not isinstance(recipe, MXFP8TrainingOpConfig):
        _refuse_recipe(recipe, "a torchao MXFP8TrainingOpConfig", names)
    return replace(recipe, kernel_preference=KernelPreference.EMULATED) if emulate else recipe


def _nvfp4_config(recipe: Any, emulate: bool) -> Any:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import (  # noqa: PLC0415 - optional
        NVFP4TrainingConfig,
    )

    if recipe is not None and not isinstance(recipe, NVFP4TrainingConfig):
        _refuse_recipe(recipe, "a torchao NVFP4TrainingConfig", [])
    return None if emulate else recipe or NVFP4TrainingConfig()


def _refuse_recipe(recipe: Any, kind: str, names: list[str]) -> None:
    allowed = kind + (f" or the name of a recipe: {', '.join(map(repr, names))}" if names else "")
    raise OptionError(option="recipe", value=recipe, allowed=allowed)


def _to_float8(layer: nn.Linear, config: Any) -> nn.Module:
    from torchao.float8 import convert_to_float8_training  # noqa: PLC0415 - optional

    converted: nn.Module = convert_to_float8_training(layer, config=config)
    return converted


def _to_mxfp8(layer: nn.Linear, config: Any) -> nn.Module:
    # quantize_(model, MXFP8TrainingOpConfig()) of torchao 0.18 drops biases. MXFP8Linear keeps them.
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear  # noqa: PLC0415 - optional

    names = ("kernel_preference", "scale_calculation_mode", "wgrad_with_hp")
    options = {name: getattr(config, name) for name in names}
    return _like(layer, lambda i, o: MXFP8Linear(i, o, bias=False, **options))


def _to_nvfp4(layer: nn.Linear, config: Any) -> nn.Module:
    if config is None:
        return _like(layer, lambda i, o: EmulatedLinear(i, o, bias=False))
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import (  # noqa: PLC0415 - optional
        _nvfp4_training_transform,
    )

    converted: nn.Module = _nvfp4_training_transform(layer, config)
    return converted


def _like(layer: nn.Linear, make: Callable[[int, int], nn.Linear]) -> nn.Linear:
    """Make a layer of another class, and give it the parameters of ``layer``."""
    with torch.device("meta"):
        made = make(layer.in_features, layer.out_features)
    made.weight, made.bias = layer.weight, layer.bias
    return made


FORMATS: Final[dict[str, Format]] = {
    "fp8": Format(side=16, rows=16, config=_float8_config, convert=_to_float8),
    "fp8-rowwise": Format(
        side=16,
        rows=16,
        config=lambda recipe, emulate: _float8_config(recipe or "rowwise", emulate),
        convert=_to_float8,
    ),
    "mxfp8": Format(side=32, rows=BLOCK["mxfp8"], config=_mxfp8_config, convert=_to_mxfp8),
    "nvfp4": Format(side=128, rows=128, config=_nvfp4_config, convert=_to_nvfp4),
}
"""Maps names to the formats that ``precision`` and ``formats`` accept besides ``"bf16"``."""

_FORMATS_OF_CLASSES: Final = {
    "Float8Linear": "fp8",
    "MXFP8Linear": "mxfp8",
    "NVFP4Linear": "nvfp4",
    EmulatedLinear.__name__: "nvfp4",
}
"""Maps the class names of converted layers to their formats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormats:
    """Decides which Linear layers are converted to which format, and converts these layers.

    Attributes:
        default: The format of layers that match no pattern. ``"bf16"`` leaves these layers unconverted.
        patterns: Maps patterns of module names, or class names, to formats. The first pattern that matches a
            layer decides its format.
        recipe: torchao's configuration for the default format, or the name of a recipe.
        emulate: True emulates the formats, which is slow but works on any device.

    Raises:
        OptionError: A format or a recipe is unknown.
        ImportError: torchao is not installed.
    """

    default: str = "bf16"
    patterns: Mapping[str, str] = field(default_factory=dict)
    recipe: Any = None
    emulate: bool = False

    def __post_init__(self) -> None:
        """Check the formats and the recipe, and whether torchao is installed."""
        for name in self.names:
            if name not in {"bf16", *FORMATS}:
                raise _unknown(name)
        if self._below and importlib.util.find_spec("torchao") is None:
            remedy = f"run: pip install 'torchao>=0.18', or {_INSTEAD}"
            msg = f"{self._below[0]!r} needs torchao, which is not installed; {remedy}"
            raise ImportError(msg)
        for name in self._below:
            self._config(name)  # raises OptionError if the recipe is for another format

    @property
    def names(self) -> list[str]:
        """The distinct formats that are used, with the default format first."""
        return [*dict.fromkeys([self.default, *self.patterns.values()])]

    @property
    def _below(self) -> list[str]:
        """The formats below 16 bits that are used."""
        return [name for name in self.names if name in FORMATS]

    def _config(self, name: str) -> Any:
        """Return torchao's configuration of a format below 16 bits."""
        recipe = self.recipe if name == self.default else None
        return FORMATS[name].config(recipe, self.emulate)

    def refuse_device(self, device_type: str) -> None:
        """Raise ValueError if the device cannot compute in a format that is not emulated."""
        for name in self._below:
            if not _emulates(self._config(name)) and not hardware_of(device_type).computes(name):
                msg = (
                    f"this {device_type} has no arithmetic for {name}, which needs {NEEDS[name].words}; "
                    f"{_INSTEAD}, or try it out slowly with emulate=True"
                )
                raise ValueError(msg)

    def require(self, models: Sequence[nn.Module]) -> None:
        """Raise ValueError if a pattern matches no module of these models."""
        require_matches(models, self.patterns, option="formats")

    def of(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, str]:
        """Return a dict with the names of the Linear layers to convert as keys, and their formats as values.

        Args:
            model: The model with the Linear layers. Layers that are already converted are left out.
            left_out: Names of modules whose layers are not converted.

        Raises:
            ValueError: A layer is named by a pattern without wildcards, and the format does not support the
                sizes of this layer.
        """
        matched = {pattern: {*matched_modules(model, [pattern])} for pattern in self.patterns}
        found = {}
        for name, layer in self._layers(model, left_out):
            pattern = next((pattern for pattern in self.patterns if name in matched[pattern]), None)
            chosen = self.default if pattern is None else self.patterns[pattern]
            if chosen == "bf16":
                continue
            if self._takes(chosen, layer):
                found[name] = chosen
            elif pattern is not None and not any(sign in pattern for sign in "*?["):
                msg = (
                    f"formats: {name} is {layer.out_features} x {layer.in_features}, but {chosen} needs "
                    f"multiples of {self._side(chosen)}; give it another format, or 'bf16'"
                )
                raise ValueError(msg)
        return found

    def convert(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, str]:
        """Convert a model's layers in place. Return a dict from the names of the layers to their formats."""
        formats = self.of(model, left_out)
        if not formats:
            if self._below and not any(is_converted(module) for module in model.modules()):
                raise ValueError(self._nothing(model))
            return {}
        if "" in formats:
            msg = (
                f"{type(model).__name__} is a Linear layer itself; put it into an nn.Sequential to convert it"
            )
            raise ValueError(msg)
        for name, chosen in formats.items():
            parent, _, child = name.rpartition(".")
            layer: Any = model.get_submodule(name)
            config = self._config(chosen)
            made = FORMATS[chosen].convert(layer, config)
            made.train(layer.training)
            casts = chosen == "mxfp8" and _emulates(config)
            hook = partial(
                _fitted_input, layer=name, format_name=chosen, multiple=self._rows(chosen), casts=casts
            )
            made.register_forward_pre_hook(hook)
            setattr(model.get_submodule(parent), child, made)
        return formats

    def _layers(self, model: nn.Module, left_out: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and not is_converted(module) and not is_within(name, left_out):
                yield clean_name(name), module

    def _takes(self, name: str, layer: nn.Linear) -> bool:
        return _fits(layer, self._side(name))

    def _side(self, name: str) -> int:
        return BLOCK["nvfp4"] if name == "nvfp4" and self.emulate else FORMATS[name].side

    def _rows(self, name: str) -> int:
        config = self._config(name)
        if name.startswith("fp8"):
            return 1 if config.emulate or config.pad_inner_dim else FORMATS[name].rows
        return BLOCK["nvfp4"] if name == "nvfp4" and self.emulate else FORMATS[name].rows

    def _nothing(self, model: nn.Module) -> str:
        name = self.default if self.default != "bf16" else self._below[0]
        return (
            f"{name}: {type(model).__name__} has no Linear layer to convert: in_features and "
            f"out_features must be multiples of {self._side(name)}, and fp32_modules are left out; "
            f"{_INSTEAD}"
        )


def _unknown(name: object) -> OptionError:
    allowed = ", ".join(map(repr, ["bf16", *FORMATS]))
    hint = did_you_mean(
        name, FORMATS, aliases={"float8": "fp8", "mx8": "mxfp8", "fp4": "nvfp4"}, written=repr
    )
    return OptionError(
        "formats", name, allowed, f"the format {name!r} is unknown; allowed are {allowed}{hint}"
    )


def _emulates(config: Any) -> bool:
    """Return whether a torchao configuration emulates a format. None stands for EmulatedLinear."""
    if config is None:
        return True
    return bool(getattr(config, "emulate", False)) or "EMULATED" in str(
        getattr(config, "kernel_preference", "")
    )


def _fits(layer: nn.Linear, side: int) -> bool:
    return not (layer.in_features % side or layer.out_features % side)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module is a converted Linear layer of torchao or amp_plugin."""
    return type(module).__name__ in _FORMATS_OF_CLASSES


def format_of(module: nn.Module) -> str:
    """Return the format in which a converted layer computes, or ``""`` for any other module."""
    name = _FORMATS_OF_CLASSES.get(type(module).__name__, "")
    if name == "fp8":
        granularity = module.config.cast_config_input.scaling_granularity.value  # type: ignore[union-attr]
        return "fp8-rowwise" if granularity == "axiswise" else "fp8"
    return name


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether the module ``name`` is one of ``modules``, or a submodule of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def leave_out(recipe: Any, model: nn.Module, names: Collection[str]) -> None:
    """Make the filter of Accelerate's AORecipeKwargs also exclude the modules in ``names``.

    If the recipe has no filter, the first and last Linear layers are also excluded, as in Accelerate.
    """
    own = recipe.module_filter_func
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    outermost = {layers[0], layers[-1]} if layers and own is None else set()

    def filtered(module: nn.Module, name: str) -> bool:
        fits = (
            isinstance(module, nn.Linear) and not is_converted(module) and _fits(module, FORMATS["fp8"].side)
        )
        wanted = fits and name not in outermost if own is None else own(module, name)
        return bool(wanted) and not is_within(name, names)

    recipe.module_filter_func = filtered


def _fitted_input(
    module: nn.Module, args: tuple[Any, ...], *, layer: str, format_name: str, multiple: int, casts: bool
) -> tuple[Any, ...] | None:
    """Check the input of a converted layer, and cast it if needed. This is a forward pre-hook.

    In emulated mxfp8 the input is cast to the dtype of the weight, because torchao's emulation multiplies
    input and weight without a cast. The cast does not change results, because the quantizer rounds a bfloat16
    number exactly like the float32 number with the same value.

    Return the new arguments if the input was cast, else None.

    Raises:
        ValueError: The layer is in training mode, and the number of rows of its input is not a multiple of
            the number that the format requires.
    """
    x = args[0] if args else None
    if not isinstance(x, Tensor):
        return None
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if rows % multiple and torch.is_grad_enabled() and module.training:
        msg = (
            f"{layer} gets {rows} rows (batch times sequence), but training in {format_name} needs a "
            f"multiple of {multiple}: change the batch size, pad the batch, or drop the last batch; or keep "
            f"this layer in bf16: formats={{{layer!r}: 'bf16'}}"
        )
        raise ValueError(msg)
    weight: Any = module.weight
    return (x.to(weight.dtype), *args[1:]) if casts and x.dtype != weight.dtype else None


def read_formats(given: Mapping[str, str] | str | Path | None) -> dict[str, str]:
    """Read a mapping or a YAML file into a dict from pattern to format.

    ``amp-plugin tune --formats`` writes YAML files of this kind.

    Raises:
        OptionError: ``given`` is neither a mapping nor the path of a valid file, or a format is unknown.
    """
    found: Any = given
    if isinstance(given, str | Path):
        try:
            found = yaml.safe_load(Path(given).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            allowed = "a YAML file of lines such as 'head: bf16', or a mapping"
            msg = f"formats={str(given)!r}: {error}; give {allowed}"
            raise OptionError(option="formats", value=given, allowed=allowed, text=msg) from error
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in (*found, *found.values())):
        allowed = "a mapping of names or patterns of modules to formats: {'head': 'bf16'}"
        raise OptionError(option="formats", value=given, allowed=allowed)
    for name in found.values():
        if name not in {"bf16", *FORMATS}:
            raise _unknown(name)
    return dict(found)


def convert(
    model: nn.Module,
    format_name: str,
    *,
    formats: Mapping[str, str] | str | Path | None = None,
    fp32_modules: Collection[str] = (),
    recipe: Any = None,
    emulate: bool = False,
) -> nn.Module:
    """Convert the Linear layers of a model in place to a format below 16 bits, with torchao.

    Use this function in a plain PyTorch loop. In Lightning, Fabric and Accelerate, ``precision="mxfp8"`` has
    the same effect. Train the model under autocast in bfloat16, without a loss scale. Parameters stay the
    same objects, so optimizers and checkpoints need no change. For ``"nvfp4"``, torchao adds two buffers to
    each layer. Convert the model before ``torch.compile`` and before ``fully_shard``. Layers that are already
    converted do not change.

    Args:
        model: The model, which is changed in place.
        format_name: ``"fp8"``, ``"fp8-rowwise"``, ``"mxfp8"`` or ``"nvfp4"``. With ``"bf16"``, only layers
            that match a pattern in ``formats`` are converted.
        formats: Other formats for some layers, as a mapping from name patterns or class names to formats, or
            as the path of a YAML file. The first pattern that matches a layer decides its format.
        fp32_modules: Names, patterns or class names of modules whose layers are not converted.
        recipe: torchao's configuration of the format, or the name of a torchao recipe.
        emulate: True emulates the format. Emulation gives correct numbers on any device, but it is slow.

    Returns:
        The model.

    Raises:
        OptionError: A format or recipe is unknown.
        ValueError: The device cannot compute in the format, the model has no layer with suitable sizes, or a
            pattern matches no module.
        ImportError: torchao is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        >>> _ = convert(model, "mxfp8", emulate=True)
        >>> [type(module).__name__ for module in model]
        ['MXFP8Linear', 'ReLU', 'Linear']
    """
    chosen = LayerFormats(default=format_name, patterns=read_formats(formats), recipe=recipe, emulate=emulate)
    found = {param.device.type for param in model.parameters()} - {"cpu", "meta"}
    chosen.refuse_device(found.pop() if found else default_device())
    chosen.require([model])
    require_matches([model], fp32_modules)
    chosen.convert(model, matched_modules(model, fp32_modules))
    return model
