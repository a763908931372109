"""Carry a plugin's region into the threads that DataParallel runs its replicas in.

``torch.nn.parallel.parallel_apply`` tells its threads that autocast is on, but not the
dtype: bf16 would become the device's default, fp16.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_plugin.adapters.lightning.settings import DTYPES

if TYPE_CHECKING:
    from amp_plugin.adapters.lightning.precision_core import PrecisionCore


def carry_into_threads(module: nn.Module, plugin: PrecisionCore) -> None:
    """Let a module's forward open the plugin's region where autocast is on with another dtype.

    Args:
        module: the module; its DataParallel replicas share the hooks.
        plugin: whose precision and device count.
    """
    region = ThreadRegion(plugin)
    module.register_forward_pre_hook(region.enter)
    module.register_forward_hook(region.leave, always_call=True)


class ThreadRegion:
    """Open a plugin's region around a forward in a thread; copies of the module share it.

    A pickled module leaves the plugin behind, which belongs to the run: there the hooks do nothing.
    """

    def __init__(self, plugin: PrecisionCore | None = None) -> None:
        self._plugin = plugin
        self._opened = threading.local()

    def enter(self, *_: Any) -> None:
        """Open the region, in a thread where autocast is on with another dtype."""
        if torch.compiler.is_compiling():
            return
        regions = vars(self._opened).setdefault("regions", [])
        regions.append(self._needed() and self._plugin.autocast_context_manager())  # type: ignore[union-attr]
        if regions[-1]:
            regions[-1].__enter__()

    def leave(self, *_: Any) -> None:
        """Close it, if it was opened."""
        if torch.compiler.is_compiling():
            return
        region = self._opened.regions.pop()
        if region:
            region.__exit__(None, None, None)

    def _needed(self) -> bool:
        if self._plugin is None:
            return False
        if threading.current_thread() is threading.main_thread():
            return False
        device, dtype = self._plugin.device, DTYPES[self._plugin.settings.precision]
        return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadRegion:
        """Return itself: a copy of the module runs under the same plugin."""
        return self

    def __reduce__(self) -> tuple[type[ThreadRegion], tuple[()]]:
        """Pickle without the plugin."""
        return ThreadRegion, ()
