"""Precision plugins for Lightning's Trainer and Fabric.

Lightning comes as two packages with classes of their own: ``lightning`` (with
``lightning.pytorch`` and ``lightning.fabric``) and ``pytorch_lightning`` (with
``lightning_fabric``). The names here are those of the one the program has imported,
of ``lightning`` if both or none; :func:`classes_for` gives either.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from amp_plugin.casting.bound_rules import replaced

if TYPE_CHECKING:
    from amp_plugin.adapters.lightning.for_lightning import AmpMonitor as AmpMonitor
    from amp_plugin.adapters.lightning.for_lightning import AmpPrecision as AmpPrecision
    from amp_plugin.adapters.lightning.for_lightning import FabricAmpPrecision as FabricAmpPrecision

__all__ = ["AmpMonitor", "AmpPrecision", "FabricAmpPrecision", "classes_for"]


def classes_for(package: str) -> ModuleType:
    """Return the module with AmpPrecision, FabricAmpPrecision and AmpMonitor for a package.

    Args:
        package: ``"lightning"`` or ``"pytorch_lightning"``, or the part that a program imports, such as
            ``"lightning.fabric"``.

    Raises:
        ValueError: another name.
        ImportError: the package is not installed.

    Example:
        >>> classes_for("lightning").AmpPrecision("bf16")
        AmpPrecision('bf16')
    """
    name = "pytorch_lightning" if package == "lightning_fabric" else package.partition(".")[0]
    if name not in {"lightning", "pytorch_lightning"}:
        msg = f"package={package!r} is unknown; allowed are 'lightning' and 'pytorch_lightning'"
        raise ValueError(msg)
    return importlib.import_module(f"{__name__}.for_{name}")


def __getattr__(name: str) -> Any:
    """Load a class for the Lightning package that this program uses."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        raise AttributeError(msg)
    other = "lightning" not in sys.modules and sys.modules.keys() & {"pytorch_lightning", "lightning_fabric"}
    return getattr(classes_for("pytorch_lightning" if other else "lightning"), name)


# -- in the place of Lightning's own, in a program that asks for precision="16-mixed" -----------------

_TRAINER: Final = ("AmpPrecision", "_precision_flag", "_precision_plugin_flag", "Trainer")
_FABRIC: Final = ("FabricAmpPrecision", "_precision_input", "_precision_instance", "Fabric")
# Lightning's modules that decide which plugin a Trainer or Fabric gets.
CONNECTORS: Final = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": ("lightning", *_TRAINER),
    "lightning.fabric.connector": ("lightning", *_FABRIC),
    "pytorch_lightning.trainer.connectors.accelerator_connector": ("pytorch_lightning", *_TRAINER),
    "lightning_fabric.connector": ("pytorch_lightning", *_FABRIC),
}
_MIXED: Final = ("16-mixed", "bf16-mixed")


@contextmanager
def plugin_in_place_of_stock(
    module: Any, precision: str | None, made: Callable[[str, bool], object]
) -> Iterator[None]:
    """Give each Trainer or Fabric that is made while the block runs our plugin for mixed precision.

    A plugin of the program's own stays. Strategies with a precision of their own keep Lightning's.

    Args:
        module: one of ``CONNECTORS``, imported.
        precision: in place of Lightning's default, 32; None leaves that alone.
        made: called with ``"Trainer(precision='16-mixed')"`` and whether the program asked for that.
    """
    from amp_plugin.adapters.lightning.precision_core import has_own_precision  # noqa: PLC0415 - loads torch
    from amp_plugin.precision import STOCK_NAMES  # noqa: PLC0415

    package, name, flag, plugin, owner = CONNECTORS[module.__name__]
    kind: Any = getattr(module, "_AcceleratorConnector" if owner == "Trainer" else "_Connector")
    decide = kind._check_and_init_precision

    def take(asked: str, *, by_program: bool, **options: Any) -> Any:
        made(f"{owner}(precision={asked!r})", by_program)
        return getattr(classes_for(package), name)(asked, **options)

    def decide_for_ours(connector: Any) -> Any:
        asked = getattr(connector, flag)
        if getattr(connector, plugin) is None and not has_own_precision(connector.strategy):
            if asked in _MIXED:
                return take(asked, by_program=True)
            if asked == "32-true" and precision is not None:
                return take(STOCK_NAMES[precision], by_program=False)
        stock = decide(connector)
        is_stock = type(stock) in {module.MixedPrecision, module.FSDPPrecision}
        if is_stock and stock.precision in _MIXED:  # the program made it
            options = {} if getattr(stock, "scaler", None) is None else {"scaler": stock.scaler}
            return take(stock.precision, by_program=True, **options)
        return stock

    with replaced(kind, "_check_and_init_precision", decide_for_ours):
        yield
