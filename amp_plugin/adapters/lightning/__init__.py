"""Precision plugins for Lightning's Trainer and Fabric.

Lightning comes as two packages with classes of their own: ``lightning`` (with
``lightning.pytorch`` and ``lightning.fabric``) and ``pytorch_lightning`` (with
``lightning_fabric``). The names here are those of the one the program has imported,
of ``lightning`` if both or none; :func:`classes_for` gives either.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
