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
    opened = threading.local()

    def enter(*_: Any) -> None:
        regions = vars(opened).setdefault("regions", [])
        regions.append(_other_dtype_in_a_thread(plugin) and plugin.autocast_context_manager())
        if regions[-1]:
            regions[-1].__enter__()

    def leave(*_: Any) -> None:
        region = opened.regions.pop()
        if region:
            region.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _other_dtype_in_a_thread(plugin: PrecisionCore) -> bool:
    if torch.compiler.is_compiling() or threading.current_thread() is threading.main_thread():
        return False
    device, dtype = plugin.device, DTYPES[plugin.settings.precision]
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not dtype
