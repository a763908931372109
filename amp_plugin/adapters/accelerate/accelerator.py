"""AmpAccelerator: Accelerate's Accelerator on amp_plugin's autocast and GradScaler."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate import checkpoints, engagement
from amp_plugin.adapters.accelerate.forward import MixedForward, RegionOptions
from amp_plugin.adapters.accelerate.gradients import Gradients
from amp_plugin.adapters.accelerate.optimizer import AmpOptimizer, torch_optimizer
from amp_plugin.adapters.accelerate.settings import OPTIONS, AmpKwargs, resolve
from amp_plugin.adapters.accelerate.skips import SkipLedger
from amp_plugin.adapters.option_checks import refuse_misfits
from amp_plugin.adapters.parameter_names import names_in, names_of
from amp_plugin.adapters.unscaled_steps import UnscaledSteps
from amp_plugin.casting.rule_sets import set_default_rules

if TYPE_CHECKING:
    from amp_plugin.casting.cast_cache import CastCache

_SIGNATURE = inspect.signature(Accelerator.__init__)


class AmpAccelerator(Gradients):
    """A drop-in for ``accelerate.Accelerator``: change the import, nothing else.

    ``mixed_precision="fp16"`` is float16 with a loss scale on every device, the CPU included. Clipping
    is right for any parameters, any number of times, and does nothing within an accumulation window;
    several optimizers, closures and optimizers without gradients work. Processes started by torchrun
    without a GPU form a group on the CPU. DeepSpeed, Megatron-LM, XLA
    and fp8 are left to Accelerate.

    Args:
        *args: Accelerator's.
        **kwargs: Accelerator's; ``kwargs_handlers`` may hold AmpKwargs.

    Attributes:
        scaler: the ``amp_plugin.GradScaler``; None unless fp16.

    Raises:
        TypeError: an argument is unknown.
        ValueError: an option or ``mixed_precision`` has a bad value; the text names its source.

    Example:
        >>> accelerator = AmpAccelerator(mixed_precision="fp16", cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for micro_batch in torch.ones(2, 4).split(1):
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(model(micro_batch).sum())
        ...         norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> accelerator.optimizer_step_was_skipped
        False
    """

    native_amp: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_misfits(type(self).__name__, args, kwargs)
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        handlers = list(given.get("kwargs_handlers") or ())
        self._amp = resolve(handlers, os.environ)
        engagement.check_precision(given.get("mixed_precision"), os.environ)
        given["kwargs_handlers"] = [one for one in handlers if not isinstance(one, AmpKwargs)]
        given.pop("self")
        given["cpu"] = given.get("cpu", False) or engagement.ranks_without_gpu(os.environ)
        self._skips = SkipLedger(exact=self._amp.get("exact_schedulers", False))
        self._unscaled_steps = UnscaledSteps()
        self._engaged = False
        self._cast_cache: CastCache | None = None
        self._loaded_folder: Path | None = None
        super().__init__(**given)
        explicit = len(given["kwargs_handlers"]) != len(handlers)
        self._engaged = engagement.is_ours(self, self._amp, explicit=explicit)
        if self._engaged:
            engagement.engage(self, self._amp)
            self.register_load_state_pre_hook(checkpoints.remember_folder(self))

    # -- preparing -------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerator does, and tell the scaler the names of the parameters."""
        if self._engaged and self.native_amp and self.is_fsdp2:  # Accelerate leaves autocast out there
            for module in args:
                if isinstance(module, nn.Module):
                    self._mix(module)
        prepared = super().prepare(*args, **kwargs)
        if self._engaged:
            self._register_names()
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model: its forward runs in the region and returns fp32."""
        if not self._engaged:
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[no-any-return]
        if self.native_amp and not getattr(model, "_is_accelerate_prepared", False):
            self._mix(model)
        native_amp, self.native_amp = self.native_amp, False  # its own wrapper stays off
        try:
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self.native_amp = native_amp

    def _mix(self, module: nn.Module) -> None:
        if not isinstance(module.__dict__.get("forward"), MixedForward):
            MixedForward.put_on(module, self._region_options(cast_cache=True))

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        """Prepare an optimizer: it steps through the scaler."""
        if not self._engaged:
            return super().prepare_optimizer(optimizer, *args, **kwargs)
        scaler, self.scaler = self.scaler, None
        try:
            prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        finally:
            self.scaler = scaler
        if isinstance(prepared, AmpOptimizer):
            return prepared
        ours = AmpOptimizer.adopt(prepared, scaler, self._skips, self._unscaled_steps)
        if scaler is not None and not self.is_fsdp2:  # its parameters are yet to be replaced there
            scaler.register(ours.optimizer)
        return ours

    def _register_names(self) -> None:
        if self.scaler is None:
            return
        named = names_in([self.unwrap_model(model) for model in self._models])
        for optimizer in map(torch_optimizer, self._optimizers):
            self.scaler.register(optimizer, names=names_of(optimizer, named))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model without its distributed wrapper; without ``keep_fp32_wrapper`` as it was."""
        inner: nn.Module = super().unwrap_model(model, keep_torch_compile=keep_torch_compile)
        if not keep_fp32_wrapper:
            for module in (inner, getattr(inner, "_orig_mod", inner)):
                if "_original_forward" in module.__dict__ and "forward" in module.__dict__:
                    MixedForward.take_off(module)
        return inner

    # -- forward and backward --------------------------------------------------------------------

    def _region_options(
        self, handler: AutocastKwargs | None = None, *, cast_cache: bool = False
    ) -> RegionOptions:
        amp = self._amp
        return RegionOptions(
            device_type=self.device.type,
            dtype=torch.float16 if self.mixed_precision == "fp16" else torch.bfloat16,
            enabled=amp.autocast_enabled if handler is None else handler.enabled,
            cache_enabled=amp.cache_enabled if handler is None else handler.cache_enabled,
            cast_cache=engagement.window_cache(self, amp) if cast_cache else None,
            fp32_outputs=amp.get("fp32_outputs", True),
        )

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block in the region of prepared models; nothing happens with ``mixed_precision="no"``."""
        with ExitStack() as stack:
            if not self._engaged:
                stack.enter_context(super().autocast(autocast_handler))
            elif self.native_amp:
                stack.enter_context(self._region_options(autocast_handler).region())
            yield

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch; the last one of a window ends the iteration: the loss scale may change."""
        with super().accumulate(*models):
            yield
        if self._engaged and self.scaler is not None and self.sync_gradients:
            self.scaler.end_iteration()

    # -- checkpoints and the end -----------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerator does; no optimizer is stepped for it through the scaler."""
        with checkpoints.optimizers_unscaled(self):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerator does; a checkpoint without a loss scale warns and keeps the present one."""
        if not self._engaged:
            super().load_state(*args, **kwargs)
            return
        with checkpoints.optimizers_unscaled(self), checkpoints.loss_scale_apart(self):
            super().load_state(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Free what Accelerator frees, and the cast weights of the accumulation window."""
        self._cast_cache = None
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End the run: torch.autocast blocks elsewhere in the process are torch's again."""
        super().end_training()
        if self._engaged:
            set_default_rules(None)


def _refuse_misfits(owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours = next((name for name in kwargs if name in OPTIONS), None)
    if ours is not None:
        msg = (
            f"{owner}: {ours!r} is an option of AmpKwargs: "
            f"write {owner}(kwargs_handlers=[AmpKwargs({ours}=...)])"
        )
        raise TypeError(msg)
    refuse_misfits(owner, _SIGNATURE, args, kwargs)
