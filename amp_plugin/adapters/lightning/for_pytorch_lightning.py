"""Defines AmpPrecision, FabricAmpPrecision and AmpMonitor for the package ``pytorch_lightning``.

This module runs the file ``for_lightning.py`` under its own name. The file looks at the name to choose the
base classes.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_plugin.adapters.lightning.for_lightning import AmpMonitor as AmpMonitor
    from amp_plugin.adapters.lightning.for_lightning import AmpPrecision as AmpPrecision
    from amp_plugin.adapters.lightning.for_lightning import FabricAmpPrecision as FabricAmpPrecision

# ``inspect.getsource`` looks for the classes in this file.
__file__ = str(Path(__file__).with_name("for_lightning.py"))
SourceFileLoader(__name__, __file__).exec_module(sys.modules[__name__])
