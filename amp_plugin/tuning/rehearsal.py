"""Choose a format below 16 bits for each Linear layer by emulation, which runs on any machine.

1. One run in float32 measures how much the rounding of each format changes the output and the gradients of
   each layer.
2. For each layer and format, one run emulates only that layer in that format. The run measures the
   relative error of the gradients of all parameters, compared with the gradients in float32.
3. :mod:`amp_plugin.tuning.placement` chooses a format for each layer based on the measured errors.
4. To verify the choice, the program is run with all layers in their chosen formats.
"""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)

from amp_plugin.formats.layers import FORMATS, LayerFormats
from amp_plugin.formats.quantizers import Rounded, products, quantize
from amp_plugin.messages import OptionError
from amp_plugin.numerics.values import as_json
from amp_plugin.patches import replaced
from amp_plugin.tuning.measure import Trials, rules_without_16_bits
from amp_plugin.tuning.placement import SPEED, cost_of, place
from amp_plugin.tuning.workload import StepFunction, Workload

_ROUNDS: Final = 4  # the largest number of format combinations that are run to verify their error
_FRAMEWORKS: Final = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "torch")


@dataclass(slots=True)
class FormatLoss:
    """The errors of one layer in one format.

    Attributes:
        output: The relative error of the output, which is the norm of the difference from the float32 output,
            divided by the norm of the float32 output.
        gradient: The relative error of the gradient of the input or of the weight, whichever is larger.
        underflow: The fraction of the input's elements that become 0.
        whole: The relative error of the gradients of all parameters if only this layer runs in the format.
    """

    output: float = 0.0
    gradient: float = 0.0
    underflow: float = 0.0
    whole: float = math.inf


@dataclass(slots=True)
class Layer:
    """A Linear layer of the program.

    Attributes:
        name: The name of the layer in ``model.named_modules()``.
        sides: ``out_features`` and ``in_features``.
        rows: The number of rows of the layer's inputs, added up over all calls to the layer in a batch.
        largest: The largest magnitude in the inputs of the layer.
        losses: Maps each format to the layer's errors in this format. A format has no entry if its kernels
            cannot handle the layer's sizes.
    """

    name: str
    sides: tuple[int, int]
    rows: int = 0
    largest: float = 0.0
    losses: dict[str, FormatLoss] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """The FLOPs per batch of the three matrix products in the forward and backward pass."""
        return 6.0 * self.rows * self.sides[0] * self.sides[1]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result of ``rehearse``, with the measured errors and the format chosen for each layer.

    Attributes:
        layers: The Linear layers, in the order in which they first ran.
        placement: Maps the name of each layer to its chosen format.
        formats: The formats that were tried.
        budget: The gradient error that was allowed.
        error: The relative gradient error with all layers in their chosen formats, measured on all batches.
        error_in_bf16: The relative gradient error with all layers in bf16.
        batches: The number of batches that were measured.
    """

    layers: tuple[Layer, ...]
    placement: dict[str, str]
    formats: tuple[str, ...]
    budget: float
    error: float
    error_in_bf16: float
    batches: int

    @property
    def cost(self) -> float:
        """The cost of the chosen formats, relative to the cost with all layers in bf16.

        The cost of a layer is its number of FLOPs divided by the speed of its format.
        """
        costs = _costs(self.layers)
        in_bf16 = cost_of({layer.name: "bf16" for layer in self.layers}, costs)
        return cost_of(self.placement, costs) / in_bf16

    @property
    def headline(self) -> str:
        """One line that says what was found."""
        moved = sum(name != "bf16" for name in self.placement.values())
        if self.error > self.budget:
            return (
                f"all layers stay in bf16, whose own gradient error of {self.error:.2%} is already more "
                f"than the budget of {self.budget:.2%}"
            )
        return (
            f"{moved} of {len(self.layers)} layers go below 16 bits, at {self.cost:.0%} of the cost of bf16; "
            f"gradient error {self.error:.2%}, in bf16 {self.error_in_bf16:.2%}, budget {self.budget:.2%}"
        )

    def table(self) -> Table:
        """Return a ``rich`` table with each layer's errors in each format. The chosen formats are marked."""
        table = Table(title=self.headline, box=None, pad_edge=False, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in {"layer", "format"} else "right")
        whole = sum(layer.flops for layer in self.layers) or 1.0
        for layer in self.layers:
            chosen = self.placement[layer.name]
            for place_in_layer, (name, loss) in enumerate(layer.losses.items()):
                first = place_in_layer == 0
                cells = (
                    layer.name if first else "",
                    f"{layer.sides[0]} x {layer.sides[1]}" if first else "",
                    f"{layer.flops / whole:.0%}" if first else "",
                    f"{layer.largest:.1e}" if first else "",
                    f"{name} <-" if name == chosen else name,
                    f"{loss.output:.1e}",
                    f"{loss.gradient:.1e}",
                    f"{loss.underflow:.1%}",
                    f"{loss.whole:.1e}",
                )
                table.add_row(*cells)
        return table

    @property
    def limits(self) -> str:
        """A string that explains the columns of the table, the cost, and what is not emulated."""
        return _LIMITS

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements and the chosen formats as JSON-serializable values."""
        numbers = ("budget", "error", "error_in_bf16", "cost", "batches", "placement")
        layers = [{**asdict(layer), "flops": layer.flops} for layer in self.layers]
        return as_json({**{name: getattr(self, name) for name in numbers}, "layers": layers})  # type: ignore[no-any-return]

    def to_yaml(self) -> str:
        """Return the text of a YAML file for the option ``formats=`` of amp_plugin."""
        lines = [*self._evidence(), *(f"{name}: {chosen}" for name, chosen in self.placement.items())]
        return "\n".join(lines) + "\n"

    def to_torchao(self) -> str:
        """Return the source of a Python file with filters for torchao's ``quantize_``."""
        rows = "".join(f"    {name!r}: {chosen!r},\n" for name, chosen in self.placement.items())
        comments = "\n".join(self._evidence())
        return _TORCHAO.format(comments=comments, rows=rows)

    def to_transformer_engine(self) -> str:
        """Return a configuration of TransformerEngine's debug features that keeps some layers in bf16."""
        in_bf16 = [re.escape(name) for name, chosen in self.placement.items() if chosen == "bf16"]
        comments = "\n".join(self._evidence())
        if not in_bf16:
            return f"{comments}\n# No layer stays in bf16.\n"
        return _TRANSFORMER_ENGINE.format(comments=comments, pattern=f"^(.*\\.)?({'|'.join(in_bf16)})$")

    def save(self, path: str | Path) -> list[Path]:
        """Write files for amp_plugin, torchao and TransformerEngine, and return their paths.

        If ``path`` is ``formats.yaml``, the other two files are ``formats_torchao.py`` and
        ``formats_te.yaml``.
        """
        file = Path(path)
        texts = {
            file: self.to_yaml(),
            file.with_name(f"{file.stem}_torchao.py"): self.to_torchao(),
            file.with_name(f"{file.stem}_te.yaml"): self.to_transformer_engine(),
        }
        for target, text in texts.items():
            target.write_text(text, encoding="utf-8")
        return [*texts]

    def _evidence(self) -> list[str]:
        version, today = vars(sys.modules["amp_plugin"])["__version__"], datetime.now(timezone.utc).date()
        made_by = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
        return [f"# {line}" for line in (self.headline, f"{self.batches} batches, {made_by}")]


_COLUMNS: Final = ("layer", "sides", "cost", "amax", "format", "output", "gradient", "underflow", "all")
_LIMITS: Final = """\
cost: the layer's share of all FLOPs, which are 6 x rows x sides.
amax: the largest magnitude of the layer's inputs. underflow: the share of input elements that become 0.
output, gradient: the relative errors of the layer's output and of its gradients, compared with float32.
all: the relative error of all parameters' gradients if only this layer is in the format.
The cost in the first line is FLOPs divided by the speed of the format: bf16 1, 8 bits 2, 4 bits 4.
The time to quantize is not counted. nvfp4 is emulated without stochastic rounding and 16x16 tiles."""
_TORCHAO: Final = '''{comments}
"""Filters for torchao: quantize_(model, config, filter_fn=is_in("mxfp8")) or, for fp8,
convert_to_float8_training(model, module_filter_fn=is_in("fp8"))."""

FORMATS = {{
{rows}}}


def is_in(format_name):
    """Return a filter that is True for the layers of a format."""
    return lambda module, name: FORMATS.get(name) == format_name
'''
_TRANSFORMER_ENGINE: Final = """{comments}
# Pass this file to nvdlfw_inspect.api.initialize(config_file=...).
# Layers that are not named here use the recipe passed to te.autocast.
# Before TransformerEngine 2.12, the feature was called DisableFP8Layer.
layers_in_bf16:
  enabled: True
  layers:
    layer_name_regex_pattern: '{pattern}'
  transformer_engine:
    DisableQuantizationLayer:
      enabled: True
"""


# -- the layers of a program -----------


@contextmanager
def _linears_followed(
    model: nn.Module | None, compute: Callable[[str, nn.Linear, Tensor], Tensor]
) -> Iterator[None]:
    """Inside a ``with`` block, call ``compute`` instead of the forward method of each Linear layer.

    ``compute`` is called with the layer's name, the layer and its input.

    If ``model`` is None, a layer's name is its path in the outermost module that contains it. Modules of
    frameworks, such as a LightningModule, do not count as outermost modules.
    """
    parents: dict[nn.Module, nn.Module] = {}
    names: dict[nn.Module, str] = {}

    def registered(parent: nn.Module, _: str, child: nn.Module | None) -> None:
        if (child is not None and type(parent).__module__.partition(".")[0] not in _FRAMEWORKS) or (
            child is not None and type(parent).__module__.startswith("torch.nn.modules")
        ):
            parents.setdefault(child, parent)

    def called(module: nn.Module, _: Any) -> None:
        if module in names:
            return
        root = module
        while root in parents:
            root = parents[root]
        for name, child in root.named_modules():
            names.setdefault(child, name)

    def forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return compute(names.get(layer, ""), layer, input)

    if model is not None:
        names |= {module: name for name, module in model.named_modules()}
    with ExitStack() as stack, replaced(nn.Linear, "forward", forward):
        stack.callback(register_module_module_registration_hook(registered).remove)
        stack.callback(register_module_forward_pre_hook(called).remove)
        yield


@contextmanager
def emulated(model: nn.Module | None, placement: Mapping[str, str]) -> Iterator[None]:
    """Return a context that emulates the Linear layers of ``placement`` in their chosen formats.

    Other layers do not change.
    """

    def compute(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        chosen = placement.get(name)
        if chosen is None:
            return functional.linear(x, layer.weight, layer.bias)
        output: Tensor = Rounded.apply(x, layer.weight, chosen)  # type: ignore[no-untyped-call, unused-ignore]
        return output if layer.bias is None else output + layer.bias.to(output.dtype)

    with _linears_followed(model, compute):
        yield


def _measuring(formats: Sequence[str], found: dict[str, Layer]) -> Callable[[str, nn.Linear, Tensor], Tensor]:
    """Return a function that runs a layer in float32, and adds the errors of each format to ``found``."""

    def compute(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """Run a layer as usual, and measure its errors in the backward pass."""
        output = functional.linear(x, layer.weight, layer.bias)
        if name and output.requires_grad:
            measured = found.setdefault(name, Layer(name, (layer.out_features, layer.in_features)))
            measure = partial(_measure, measured, formats, x.detach(), layer.weight.detach())
            output.register_hook(measure)  # type: ignore[no-untyped-call]
        return output

    return compute


@torch.no_grad()
def _measure(layer: Layer, formats: Sequence[str], x: Tensor, weight: Tensor, grad: Tensor) -> None:
    """For each format, measure the errors of one call to a layer."""
    x, weight = x.reshape(-1, x.shape[-1]).float(), weight.float()
    grad = grad.reshape(-1, grad.shape[-1]).float()
    layer.rows += x.shape[0]
    layer.largest = max(layer.largest, float(x.abs().max()))
    with torch.autocast(x.device.type, enabled=False):
        exact = (x @ weight.t(), grad @ weight, grad.t() @ x)
        for chosen in formats:
            if not _fits(chosen, weight, x.shape[0]):
                layer.losses.pop(chosen, None)
                continue
            rounded: Any = products(chosen, x, weight, grad)
            output, *gradients = map(_relative, rounded, exact)
            rounded_x, _ = quantize(x.contiguous(), chosen)
            lost = (rounded_x == 0) & (x != 0)
            loss = layer.losses.setdefault(chosen, FormatLoss())
            loss.output, loss.gradient = max(loss.output, output), max(loss.gradient, *gradients)
            loss.underflow = max(loss.underflow, float(lost.float().mean()))


def _fits(name: str, weight: Tensor, rows: int) -> bool:
    if name not in FORMATS:
        return True
    side = FORMATS[name].side
    return not (weight.shape[0] % side or weight.shape[1] % side or rows % FORMATS[name].rows)


def _relative(rounded: Tensor, exact: Tensor) -> float:
    norm = exact.double().norm()
    return float((rounded.double() - exact.double()).norm() / norm) if norm else 0.0


# -- the search ------------------------


def rehearse(
    step: Callable[[Any], object],
    *,
    model: nn.Module,
    batches: Sequence[Any],
    formats: Sequence[str] = ("nvfp4", "mxfp8", "fp8", "bf16"),
    budget: float = 0.01,
    device_type: str = "",
    progress: bool = False,
) -> Rehearsal:
    """Emulate each Linear layer in each format, and choose formats within a gradient error budget.

    The emulation runs on any machine. ``step`` runs once for each layer and format on the first batch, and a
    few times on all batches. Each run starts with the same weights and random numbers. A layer never gets a
    format whose hardware kernels cannot handle the layer's sizes.

    Args:
        step: A function that runs the forward and backward pass on a batch. It must not step an optimizer.
        model: The model whose gradients are compared. Its weights are not changed.
        batches: The arguments of ``step``, one for each batch.
        formats: The formats to try, any of ``"bf16"``, ``"fp8"``, ``"fp8-rowwise"``, ``"mxfp8"`` and
            ``"nvfp4"``.
        budget: The relative gradient error that is allowed, such as 0.01 for 1 %. The relative gradient error
            is the norm of the difference from the float32 gradients, divided by the norm of the float32
            gradients. The gradients of all parameters are treated as one vector.
        device_type: The device type on which the model runs. The default is the device type of the model's
            parameters.
        progress: True shows what is running.

    Returns:
        The errors and the chosen formats. The method ``table()`` shows the result, and
        ``save("formats.yaml")`` writes it.

    Raises:
        OptionError: A format or the budget is not allowed.
        ValueError: The step changes a weight or computes no gradients, or no Linear layer runs.
        ImportError: torchao is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> batches = [torch.randn(32, 32)]
        >>> found = rehearse(step, model=model, batches=batches, formats=["fp8", "bf16"], budget=0.2)
        >>> found.placement
        {'0': 'fp8', '2': 'fp8'}
    """
    device = device_type or next((param.device.type for param in model.parameters()), "cpu")
    workload = StepFunction(step, model, batches)
    return rehearsed(workload, device, formats=formats, budget=budget, progress=progress)


def rehearsed(
    workload: Workload, device_type: str, *, formats: Sequence[str], budget: float, progress: bool
) -> Rehearsal:
    """Rehearse a workload. :func:`rehearse` explains the arguments."""
    tried = _checked(formats, budget)
    rules = rules_without_16_bits(device_type)
    with Console(file=sys.stderr, quiet=not progress).status("") as status:
        status.update("running in float32")
        trials = Trials(workload, device_type, reference=torch.float32)
        found_layers: dict[str, Layer] = {}
        with _linears_followed(workload.model, _measuring(tried, found_layers)):
            trials.measure(rules, batches=1)
        layers = [layer for layer in found_layers.values() if layer.losses]
        if not layers:
            msg = "no Linear layer gave its weight a gradient; rehearse emulates nn.Linear and its subclasses"
            raise ValueError(msg)

        def error(placement: Mapping[str, str], *, batches: int | None = None) -> float:
            with emulated(workload.model, placement):
                return trials.measure(rules, batches=batches).error

        for layer in layers:
            for name, loss in layer.losses.items():
                status.update(f"{layer.name} in {name}")
                loss.whole = error({layer.name: name}, batches=1)
        status.update("running placements")
        placement, found, in_bf16 = _verified(layers, error, budget)
    return Rehearsal(
        layers=tuple(layers),
        placement=placement,
        formats=tried,
        budget=budget,
        error=found,
        error_in_bf16=in_bf16,
        batches=trials.batches,
    )


def _verified(
    layers: Sequence[Layer], error: Callable[[Mapping[str, str]], float], budget: float
) -> tuple[dict[str, str], float, float]:
    """Run the program with several format combinations, and return the cheapest one within the budget.

    Returns:
        The format of each layer, the gradient error with these formats, and the gradient error in bf16.
    """
    costs = _costs(layers)
    errors = {layer.name: {name: loss.whole for name, loss in layer.losses.items()} for layer in layers}
    best = {layer.name: "bf16" for layer in layers}
    in_bf16 = found = error(best)
    allowed, seen = budget, [best]
    for _ in range(_ROUNDS):
        placement = place(costs, errors, allowed)
        if placement in seen:
            break
        seen.append(placement)
        measured = error(placement)
        if measured <= budget and cost_of(placement, costs) < cost_of(best, costs):
            best, found = placement, measured
        allowed *= min(max(budget / max(measured, 1e-30), 0.25), 4.0)
    return best, found, in_bf16


def _costs(layers: Sequence[Layer]) -> dict[str, dict[str, float]]:
    return {layer.name: {name: layer.flops / SPEED[name] for name in layer.losses} for layer in layers}


def _checked(formats: Sequence[str], budget: float) -> tuple[str, ...]:
    """Check the arguments, and return the formats plus bf16, in which every layer can run."""
    LayerFormats(patterns={f"format {number}": name for number, name in enumerate(formats)})
    if not (isinstance(budget, int | float) and 0 < budget < 1):
        allowed = "a share between 0 and 1: 0.01 for 1 %"
        raise OptionError(option="budget", value=budget, allowed=allowed)
    return tuple(dict.fromkeys([*formats, "bf16"]))
