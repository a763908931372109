"""Defines AmpPrecision, FabricAmpPrecision and AmpMonitor for the package ``pytorch_lightning``."""

from __future__ import annotations

import lightning_fabric as fabric
import pytorch_lightning as pytorch
from lightning_fabric.plugins import FSDPPrecision as FabricFSDPPrecision
from lightning_fabric.plugins import MixedPrecision as FabricMixedPrecision
from pytorch_lightning.plugins import FSDPPrecision, MixedPrecision

from amp_plugin.adapters.lightning.fabric_precision import FabricPrecision, join_fabric
from amp_plugin.adapters.lightning.monitor import Monitor
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision


class AmpPrecision(TrainerPrecision, MixedPrecision, FSDPPrecision):  # type: ignore[misc, override]
    __doc__ = (TrainerPrecision.__doc__ or "").replace("lightning.pytorch", "pytorch_lightning")
    package = pytorch


class FabricAmpPrecision(FabricPrecision, FabricMixedPrecision, FabricFSDPPrecision):  # type: ignore[override]
    __doc__ = (FabricPrecision.__doc__ or "").replace("lightning.fabric", "lightning_fabric")
    package = fabric


class AmpMonitor(Monitor, pytorch.Callback):
    __doc__ = Monitor.__doc__


join_fabric(FabricAmpPrecision)
