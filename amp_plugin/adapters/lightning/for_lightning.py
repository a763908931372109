"""Defines AmpPrecision, FabricAmpPrecision and AmpMonitor for the package ``lightning``."""

from __future__ import annotations

from lightning import fabric, pytorch
from lightning.fabric.plugins import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision

from amp_plugin.adapters.lightning.fabric_precision import FabricPrecision, join_fabric
from amp_plugin.adapters.lightning.monitor import Monitor
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision


class AmpPrecision(TrainerPrecision, MixedPrecision, FSDPPrecision):  # type: ignore[misc, override]
    __doc__ = TrainerPrecision.__doc__
    package = pytorch


class FabricAmpPrecision(FabricPrecision, FabricMixedPrecision, FabricFSDPPrecision):  # type: ignore[override]
    __doc__ = FabricPrecision.__doc__
    package = fabric


class AmpMonitor(Monitor, pytorch.Callback):
    __doc__ = Monitor.__doc__


join_fabric(FabricAmpPrecision)
