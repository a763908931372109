"""FabricAmpPrecision: what it does at each call of Lightning's Fabric.

Fabric does not tell a plugin its device or the end of an iteration: the device is that of the modules set
up, when one of them first runs; a requested update waits for the next loss.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.lightning.precision_core import PrecisionCore
from amp_plugin.adapters.scaler import fsdp_root, register, torch_optimizer
from amp_plugin.casting.threads import autocast_module
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.options import LightningOptions, lists_options
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import parameter_layouts
from amp_plugin.weights.ddp import reduce_in_fp32, refuse_sharded, sharded_by


class _Modules(weakref.WeakKeyDictionary[nn.Module, None]):
    """What this process has set up, in order, as long as it lives; pickled empty, for spawned processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@lists_options(LightningOptions)
class FabricPrecision(PrecisionCore):
    """Mixed precision for ``lightning.fabric.Fabric(plugins=[...])``, under any of its strategies.

    Inputs keep their dtypes, half-precision outputs come back as fp32.
    ``fabric.save(path, {..., "precision": plugin})`` keeps the loss scale.

    Args:
        {options}

    Raises:
        ValueError: an argument is not one of the allowed values.
        TypeError: at the first backward, under DeepSpeed.

    Example:
        >>> import torch
        >>> from amp_plugin import FabricAmpPrecision
        >>> plugin = FabricAmpPrecision("bf16")  # for Fabric(plugins=[plugin])
        >>> plugin.convert_output(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    advice = "for Fabric without precision=...; the Trainer takes AmpPrecision"

    def _begin(self) -> None:
        super()._begin()
        self._modules, self._wrapped = _Modules(), _Modules()
        self._started = False

    # -- set-up -------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Put ``fp32_modules`` under fp32; let DataParallel's threads run replicas in our region."""
        self._weights.set_up(module, self.settings.fp32_modules)
        module = autocast_module(super().convert_module(module))
        self._modules[module] = None
        return module

    def note_wrapped(self, module: nn.Module) -> None:
        """Learn how a strategy has wrapped a module that was set up, and refuse what it cannot do."""
        refuse_sharded(self.settings.weights, sharded_by(module))
        self._check_shards(module)
        self._wrapped[module] = None
        reduce_in_fp32(module)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Make an optimizer known, so that its gradients follow the scale before its first step too."""
        if optimizer not in self._scaler.optimizers and isinstance(optimizer, Optimizer):  # not DeepSpeed's
            self._weights.add(self._modules, [optimizer])
            register(self._scaler, [optimizer], list(self._modules))

    def _ready(self, optimizer: Any = None) -> GradScaler:
        """Return the scaler once the device is known; it knows the optimizer now, if it was not set up."""
        if not self._started:
            self._start_once()
        if optimizer is not None:
            self.add_optimizer(optimizer)
        return self._scaler

    @outside_graphs
    def _start_once(self) -> None:
        modules = list(self._modules)
        tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
        tensor = next(tensors, None)
        if tensor is None and not self.device:
            msg = (
                f"{self!r} does not know its device yet: set a module with parameters up first "
                "(fabric.setup), or pass device='cpu' or 'cuda'"
            )
            raise RuntimeError(msg)
        roots = (fsdp_root(module) for module in [*self._wrapped, *modules])
        root = next((root for root in roots if root is not None), None)
        device = self.device if tensor is None else tensor.device.type
        may_be_offloaded = tensor is None or root is not None or parameter_layouts([tensor])
        if not may_be_offloaded:
            remedy = f"use Fabric(accelerator={self.settings.device!r}) and set the module up"
            self._refuse_other_device(device, remedy)
        optimizers = self._scaler.optimizers
        self._start(device, root)
        self._started = True
        register(self._scaler, optimizers, modules)

    # -- forward ------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """Run a forward in the precision asked for."""
        self._ready()
        return self.autocast_context_manager()

    def convert_output(self, data: Any) -> Any:
        """Return fp16 and bf16 outputs as fp32, for losses outside the module; others as they are."""
        if self.settings.training_dtype is torch.float32:
            return data
        return apply_to_collection(data, Tensor, _as_fp32)

    # -- backward and step --------------------------------------------------------------------

    @outside_graphs
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward without autocast."""
        self._refuse_strategy(model)
        scaler = self._ready()
        inside = torch.is_autocast_enabled(self.device)
        with self._no_region() if inside else nullcontext():
            self.package.plugins.Precision.backward(self, scaler.scale(tensor), model, *args, **kwargs)

    @outside_graphs
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Unscale and step, or skip; closures too."""
        optimizer = torch_optimizer(optimizer)
        scaler = self._ready(optimizer)  # a first closure runs its forward and backward only below
        output = scaler.step(optimizer, **kwargs)
        scaler.update()
        self._attempted_steps += 1
        return output

    @outside_graphs
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale before Fabric clips; any number of times."""
        self._ready(optimizer).ensure_unscaled(optimizer)

    @outside_graphs
    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, *, fold: bool = False
    ) -> Tensor:
        """Clip unscaled gradients; an overflow gives an infinite norm, and the step is skipped.

        Args:
            optimizer: its gradients are clipped, the optimizer of ``fabric.setup`` or its own.
            max_norm: largest total norm.
            norm_type: the p of the norm.
            fold: leave the clip to the step, which works it in as it reads the gradients, where the optimizer
                can. Then do not look at ``.grad`` before the step: it is neither unscaled nor clipped.

        Returns:
            The norm before clipping, float32, 0-dim.
        """
        optimizer = torch_optimizer(optimizer)
        return self._ready(optimizer).clip_grad_norm_(optimizer, max_norm, norm_type, fold=fold)

    @classmethod
    @contextmanager
    def backward_allowed(cls) -> Iterator[None]:
        """Let ``torch.autograd.grad`` through, which Fabric takes for a forgotten fabric.backward."""
        guard = cls.package.wrappers
        before = guard._in_fabric_backward
        guard._in_fabric_backward = True
        try:
            yield
        finally:
            guard._in_fabric_backward = before


def join_fabric(package: Any) -> None:
    """Have Fabric's set-up report modules and optimizers to a FabricPrecision.

    Fabric has no hook for that: ``setup`` shows a plugin no optimizer and no wrapped module. But each ends
    in a ``_FabricOptimizer`` or ``_FabricModule``, made with the strategy, which knows the plugin.
    """
    wrappers = package.wrappers
    _report(wrappers._FabricOptimizer, lambda plugin, made: plugin.add_optimizer(made.optimizer))
    _report(wrappers._FabricModule, lambda plugin, made: plugin.note_wrapped(made._forward_module))  # noqa: SLF001


def _report(wrapper: Any, report: Callable[[FabricPrecision, Any], None]) -> None:
    wrap = wrapper.__init__

    @functools.wraps(wrap)
    def wrap_and_report(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        if isinstance(self._strategy.precision, FabricPrecision):
            report(self._strategy.precision, self)

    wrapper.__init__ = wrap_and_report


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
