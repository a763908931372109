"""FabricAmpPrecision translates calls from Lightning's Fabric into calls to a Session.

Fabric does not tell a plugin its device, so the plugin takes the device from the strategy when a module is
set up. Nor does Fabric tell a plugin when an iteration ends, so a pending update of the loss scale is
applied when the next loss is scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.lightning.precision_core import PrecisionCore
from amp_plugin.adapters.scaler import anomalies_explained, scaler_groups, torch_optimizer
from amp_plugin.casting.region import autocast
from amp_plugin.casting.threads import autocast_module
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.options import PluginOptions, lists_options, takes
from amp_plugin.patches import replaced
from amp_plugin.scaling.penalty import surround_backward
from amp_plugin.scaling.words import Words
from amp_plugin.weights.formats import HALVES


@lists_options(PluginOptions)
class FabricPrecision(PrecisionCore):
    """Mixed precision for ``lightning.fabric.Fabric(plugins=[...])``, under most Fabric strategies.

    Model inputs keep their dtypes. Model outputs in 16 bits are converted to fp32. ``fabric.save(path, {...,
    "precision": plugin})`` saves the loss scale.

    Args:
        {options}

    Raises:
        ValueError: an argument is not one of the allowed values.
        TypeError: a module is set up with a DeepSpeed or XLA strategy.

    Example:
        >>> import torch
        >>> from amp_plugin import FabricAmpPrecision
        >>> plugin = FabricAmpPrecision("bf16")  # for Fabric(plugins=[plugin])
        >>> plugin.convert_output(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    words = Words(
        backward="fabric.backward(loss)",
        unscale="plugin.unscale_gradients(optimizer)",
        step="optimizer.step()",
        prepare="fabric.setup_optimizers(optimizer)",
        bf16="use FabricAmpPrecision('bf16')",
        reduce="DDPStrategy(ddp_comm_hook=bf16_compress_hook)",
    )

    @takes(PluginOptions, by_position=1)
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._groups: dict[str, Any] = {}

    # -- set-up ----------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make ``fp32_modules`` compute in fp32, and make replicas of DataParallel run under autocast."""
        self.session.set_up_weights(module, self.settings.fp32_modules)
        return autocast_module(super().convert_module(module))

    def note_wrapped(self, module: Any, strategy: Any) -> None:
        """Begin the run after Fabric has wrapped a module. Raise if the wrapper is not supported."""
        self._refuse_strategy(strategy)
        self._check_shards(module)
        self._groups = self._groups or scaler_groups(module)
        optimizers = self._scaler.core.optimizers
        self._start(strategy.root_device.type, self._groups)
        self.session.add([module], optimizers, list(self.session.models))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Register an optimizer with the scaler, which must know the optimizer before its first step."""
        self.session.add([], [optimizer], list(self.session.models))

    # -- forward ---------------------------

    def convert_output(self, data: Any) -> Any:
        """Convert fp16 and bf16 outputs to fp32, because the loss may be computed outside the module.

        Outputs of other dtypes are returned unchanged.
        """
        if self.session.training_dtype is torch.float32:
            return data
        return apply_to_collection(data, Tensor, lambda t: t.float() if t.dtype in HALVES else t)

    # -- backward and step -----------------

    @outside_graphs
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward without autocast."""
        device = self.device or tensor.device.type
        with autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            loss = self._scaler.scale(tensor)
            models = self.session.models if self._scaler.is_enabled() else []
            with self.session.watching(models), anomalies_explained(self._scaler):
                self.package.plugins.Precision.backward(self, loss, model, *args, **kwargs)

    @outside_graphs
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Unscale, then step or skip. Closures work too."""
        return self.session.step(torch_optimizer(optimizer), **kwargs)

    @outside_graphs
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale before Fabric clips. A second call does nothing."""
        self._scaler.core.ensure_unscaled(torch_optimizer(optimizer))

    @outside_graphs
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of unscaled gradients.

        After an overflow the norm is infinite and the step is skipped.

        Args:
            optimizer: the optimizer whose gradients are clipped. Both the wrapper from ``fabric.setup`` and
                torch's optimizer are accepted.
            max_norm: the largest total norm.
            norm_type: the p of the p-norm.

        Returns:
            The total norm before clipping (float32, 0-dim).
        """
        return self._scaler.clip_grad_norm_(torch_optimizer(optimizer), max_norm, norm_type)

    @classmethod
    def backward_allowed(cls) -> AbstractContextManager[None]:
        """Allow ``torch.autograd.grad``, which Fabric mistakes for a call to ``loss.backward()``."""
        return replaced(cls.package.wrappers, "_in_fabric_backward", value=True)


def join_fabric(plugin: type[FabricPrecision]) -> None:
    """Make Fabric's wrappers report modules and optimizers to the plugin, and allow gradient penalties."""
    surround_backward(plugin.backward_allowed)
    wrappers = plugin.package.wrappers
    for wrapper in (wrappers._FabricOptimizer, wrappers._FabricModule):
        wrapper.__init__ = _reporting(wrapper.__init__)


def _reporting(wrap: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wrap)
    def wrap_and_report(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        plugin = self._strategy.precision
        if isinstance(plugin, FabricPrecision):
            if isinstance(self, nn.Module):
                plugin.note_wrapped(self._forward_module, self._strategy)
            elif isinstance(self.optimizer, Optimizer):
                plugin.add_optimizer(self.optimizer)

    return wrap_and_report
