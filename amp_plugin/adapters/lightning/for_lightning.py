"""Defines AmpPrecision, FabricAmpPrecision and AmpMonitor for the package ``lightning``.

The module ``for_pytorch_lightning`` runs this file under its own name. The base classes are then those of the
package ``pytorch_lightning``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_plugin.adapters.lightning.fabric_precision import FabricPrecision, join_fabric
from amp_plugin.adapters.lightning.monitor import Monitor
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision

if TYPE_CHECKING or not __name__.endswith(".for_pytorch_lightning"):
    from lightning import fabric, pytorch
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pytorch


class AmpPrecision(TrainerPrecision, pytorch.plugins.MixedPrecision, pytorch.plugins.FSDPPrecision):  # type: ignore[misc, override]
    __doc__ = (TrainerPrecision.__doc__ or "").replace("lightning.pytorch", pytorch.__name__)
    package = pytorch


class FabricAmpPrecision(FabricPrecision, fabric.plugins.MixedPrecision, fabric.plugins.FSDPPrecision):  # type: ignore[override]
    __doc__ = (FabricPrecision.__doc__ or "").replace("lightning.fabric", fabric.__name__)
    package = fabric


class AmpMonitor(Monitor, pytorch.Callback):
    __doc__ = Monitor.__doc__


join_fabric(FabricAmpPrecision)
