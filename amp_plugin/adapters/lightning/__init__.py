"""Precision plugins for Lightning's Trainer and Fabric."""

from __future__ import annotations

from amp_plugin.adapters.lightning.for_lightning import AmpMonitor, AmpPrecision

__all__ = ["AmpMonitor", "AmpPrecision"]
