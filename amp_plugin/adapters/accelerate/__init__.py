"""Mixed precision for Accelerate: AmpAccelerator, and install() for code that makes its own Accelerator."""

from __future__ import annotations

from amp_plugin.adapters.accelerate.accelerator import AmpAccelerator
from amp_plugin.adapters.accelerate.installation import install, uninstall
from amp_plugin.adapters.accelerate.settings import AmpKwargs

__all__ = ["AmpAccelerator", "AmpKwargs", "install", "uninstall"]
