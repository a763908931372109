"""Precision plugins for Lightning's Trainer and Fabric.

Lightning is published as two packages with separate classes, ``lightning`` and ``pytorch_lightning``. The
package ``lightning`` contains ``lightning.pytorch`` and ``lightning.fabric``. The package
``pytorch_lightning`` comes with ``lightning_fabric``. The classes in this module are for the package that the
program has imported, or for ``lightning`` if it has imported both or neither. :func:`classes_for` returns the
classes for either package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from amp_plugin.patches import replaced

if TYPE_CHECKING:
    from amp_plugin.adapters.lightning.for_lightning import AmpMonitor, AmpPrecision, FabricAmpPrecision

__all__ = ["AmpMonitor", "AmpPrecision", "FabricAmpPrecision", "classes_for"]


def classes_for(package: str) -> ModuleType:
    """Return the module that defines AmpPrecision, FabricAmpPrecision and AmpMonitor for a Lightning package.

    Args:
        package: ``"lightning"``, ``"pytorch_lightning"``, or a subpackage such as ``"lightning.fabric"``.

    Raises:
        ValueError: the name is unknown.
        ImportError: the package is not installed.

    Example:
        >>> classes_for("lightning").AmpPrecision("bf16")
        AmpPrecision('bf16')
    """
    name = "pytorch_lightning" if package == "lightning_fabric" else package.partition(".")[0]
    if name not in {"lightning", "pytorch_lightning"}:
        msg = f"package={package!r} is unknown; allowed are 'lightning' and 'pytorch_lightning'"
        raise ValueError(msg)
    try:
        return importlib.import_module(f"{__name__}.for_{name}")
    except ModuleNotFoundError as error:
        if error.name == name:
            error.msg = f"{name} is not installed; run: pip install '{name.replace('_', '-')}>=2.6.4'"
        raise


def __getattr__(name: str) -> Any:
    """Return a plugin class for the Lightning package that the program has imported."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        raise AttributeError(msg)
    other = "lightning" not in sys.modules and sys.modules.keys() & {"pytorch_lightning", "lightning_fabric"}
    return getattr(classes_for("pytorch_lightning" if other else "lightning"), name)


# -- under amp-plugin run --------------

_TRAINER: Final = ("Trainer", "_AcceleratorConnector", "_precision_flag", "_precision_plugin_flag")
_FABRIC: Final = ("Fabric", "_Connector", "_precision_input", "_precision_instance")
# Maps the Python modules in which Lightning chooses a precision plugin to names in these modules.
CONNECTORS: Final = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": _TRAINER,
    "lightning.fabric.connector": _FABRIC,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _TRAINER,
    "lightning_fabric.connector": _FABRIC,
}
_MIXED: Final = ("16-mixed", "bf16-mixed")


@contextmanager
def plugin_in_place_of_stock(
    module: Any, precision: str | None, made: Callable[[str], object]
) -> Iterator[None]:
    """Make each Trainer or Fabric that is created in the block use amp_plugin for mixed precision.

    ``precision`` replaces Lightning's default precision, 32. ``made`` is called with a string such as
    ``"Trainer(precision=...)"`` for each new Trainer or Fabric.
    """
    from amp_plugin.adapters.lightning.precision_core import has_own_precision  # noqa: PLC0415 - loads torch
    from amp_plugin.precision import STOCK_NAMES  # noqa: PLC0415

    owner, connector_name, flag, plugin = CONNECTORS[module.__name__]
    kind: Any = getattr(module, connector_name)
    decide = kind._check_and_init_precision

    def take(asked: str, **options: Any) -> Any:
        made(f"{owner}(precision={asked!r})")
        ours = classes_for(module.__name__.partition(".")[0])
        return (ours.AmpPrecision if owner == "Trainer" else ours.FabricAmpPrecision)(asked, **options)

    def decide_for_ours(connector: Any) -> Any:
        asked = getattr(connector, flag)
        if getattr(connector, plugin) is None and not has_own_precision(connector.strategy):
            if asked == "32-true" and precision is not None:
                asked = STOCK_NAMES[precision]
            if asked in _MIXED:
                return take(asked)
        stock = decide(connector)
        is_stock = type(stock) in {module.MixedPrecision, module.FSDPPrecision}
        # Replace Lightning's own mixed-precision plugin if the program has passed one.
        if is_stock and stock.precision in _MIXED:
            options = {} if getattr(stock, "scaler", None) is None else {"scaler": stock.scaler}
            return take(stock.precision, **options)
        return stock

    with replaced(kind, "_check_and_init_precision", decide_for_ours):
        yield
