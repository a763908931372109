"""Lines of Python that compute in fp32 what overflowed, ready to be pasted into the program."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from amp_plugin.numerics.module_paths import ModuleAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change to a program.

    Attributes:
        place: where the lines go, in words.
        code: the lines; they run as they are, where the model is named ``model``.
    """

    place: str
    code: str

    def __str__(self) -> str:
        return f"# {self.place}\n{self.code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """How a program gives an adapter an option: the place, and the code around ``name=value``."""

    adapter: str
    place: str
    before: str


def cures_of(
    module: ModuleAddress, rule_names: Sequence[str], device_type: str, loaded: Container[str] = sys.modules
) -> tuple[Cure, ...]:
    """Return the ways to compute an op in fp32, the one of its module first.

    Args:
        module: in which the op ran; for the outermost one there is none: nothing would stay in 16 bits.
        rule_names: the ops to give the rule fp32, as ``OpRules.with_rule`` takes them.
        device_type: of the tensors that the op made: ``"cpu"``, ``"cuda"``, ...
        loaded: modules; of adapters among them the options are named, instead of what a plain loop does.
    """
    written = [way for way in _adapters(device_type) if way.adapter in loaded]
    return (*_of_module(module, written), *_of_rule(rule_names, device_type, written))


def _adapters(device_type: str) -> tuple[_Written, ...]:
    return (
        _Written(
            adapter="amp_plugin.adapters.lightning",
            place="Lightning, an option of the plugin (in Fabric FabricAmpPrecision)",
            before=f'amp_plugin.AmpPrecision("fp16", device="{device_type}", ',
        ),
        _Written(
            adapter="amp_plugin.adapters.accelerate",
            place="Accelerate, an option in kwargs_handlers",
            before="amp_plugin.AmpKwargs(",
        ),
    )


def _of_module(module: ModuleAddress, written: Sequence[_Written]) -> Iterator[Cure]:
    if not module.path:
        return
    for way in written:
        of_lightning = way.adapter.endswith("lightning") and not module.is_of_lightning
        pattern = f"*.{module.path}" if of_lightning else module.path
        code = f'import amp_plugin\n{way.before}fp32_modules=["{pattern}"])'
        yield Cure(place=f"the module in fp32: {way.place}", code=code)
    if not written:
        yield Cure(
            place=f"the module in fp32: after the line that makes the model; model is your {module.model}",
            code="import amp_plugin, torch\n"
            f'amp_plugin.run_in(torch.float32)(model.get_submodule("{module.path}"))',
        )


def _of_rule(names: Sequence[str], device_type: str, written: Sequence[_Written]) -> Iterator[Cure]:
    if not names:
        return
    changes = "".join(f'.with_rule("{name}", "fp32")' for name in names)
    rules = f'amp_plugin.OpRules.default("{device_type}"){changes}'
    listed = " and ".join(names)
    for way in written:
        code = f"import amp_plugin\n{way.before}rules={rules})"
        yield Cure(place=f"{listed} in fp32, in all modules: {way.place}", code=code)
    if not written:
        yield Cure(
            place=f"{listed} in fp32, in all modules: once, before the training begins",
            code=f"import amp_plugin\namp_plugin.set_default_rules({rules})",
        )
