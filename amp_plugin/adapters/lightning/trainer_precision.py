"""AmpPrecision translates calls from Lightning's Trainer into calls to autocast and GradScaler.

All numerical work is done by ``amp_plugin.autocast`` and ``amp_plugin.GradScaler``. The hooks of an optimizer
step do the following:

- ``train_step_context`` runs the forward pass and the loss under autocast.
- ``pre_backward`` calls ``on_before_backward`` with the loss, then scales the loss.
- ``backward`` runs without autocast, even in manual optimization.
- ``optimizer_step`` unscales, calls ``on_before_optimizer_step``, clips, steps or skips, and updates the
  scale.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from amp_plugin.adapters.lightning.precision_core import PrecisionCore
from amp_plugin.adapters.lightning.user_code import (
    NOT_AFTER_CLIPPING,
    Scheduled,
    average_landed_steps,
    averages_in_fp32,
    calls_closure_again,
    hold_schedulers,
    refuse_strays,
    release_schedulers,
    scheduled_after_steps,
    users_methods,
)
from amp_plugin.adapters.scaler import anomalies_explained, scaler_groups, torch_optimizer
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.options import PluginOptions, lists_options, takes
from amp_plugin.removed import removed_attribute
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.shared import OUR_KEY
from amp_plugin.scaling.words import Words
from amp_plugin.weights.ddp import refuse_sharded, sharded_by

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig

# The keys under which Lightning's own plugins save the loss scale. The last key is older than Lightning 1.6.
STOCK_KEYS = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")


@lists_options(PluginOptions)
class TrainerPrecision(PrecisionCore):
    """Mixed precision for ``lightning.pytorch.Trainer(plugins=[...])``, under most Trainer strategies.

    Args:
        {options}

    Raises:
        ValueError: an argument is not one of the allowed values.
        ImportError: ``"fp8"``, and torchao is not installed.
        TypeError: an argument is unknown or has the wrong type. TypeError is also raised if training starts
            under a strategy that handles mixed precision itself (DeepSpeed, XLA).

    Example:
        >>> from amp_plugin import AmpPrecision
        >>> plugin = AmpPrecision("fp16", fp32_modules=["LayerNorm"])  # for Trainer(plugins=[plugin])
        >>> plugin.precision
        '16-mixed'
    """

    if not TYPE_CHECKING:
        __getattr__ = removed_attribute

    checkpoint_key: str = "MixedPrecision"
    """The key in checkpoints under which the loss scale is saved."""
    # As with Lightning's own plugin, a whole training_step is one autocast region.
    shares_casts = False

    words = Words(
        backward="self.manual_backward(loss)",
        unscale="trainer.precision_plugin.scaler.unscale_(optimizer)",
        step="optimizer.step()",
        prepare="configure_optimizers()",
        bf16="compute the named modules in fp32 (fp32_modules=[...]), use AmpPrecision('bf16')",
        endless="AmpMonitor(max_skips_in_a_row=...)",
        reduce="DDPStrategy(ddp_comm_hook=bf16_compress_hook)",
    )

    @takes(PluginOptions, by_position=1)
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # The schedulers that must not step after a skipped optimizer step.
        self._schedulers: list[Scheduled] = []
        # The number of steps that were not skipped. On a GPU the host learns about a skip one step late.
        self._landed_steps = 0
        self._trainer: Any = None  # the Trainer of the current run
        # True if the checkpoint must be loaded again, because the first load rounded the weights.
        self._loads_again = False
        self._users_methods: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the Trainer."""
        return {**vars(self), "_trainer": None}

    @property
    def _fits(self) -> bool:
        """Whether this is a ``trainer.fit`` run. It is also True before a run has begun."""
        return self._trainer is None or self._trainer.state.fn == "fit"

    @property
    def _is_manual(self) -> bool:
        return self._trainer is not None and not self._trainer.lightning_module.automatic_optimization

    # -- set-up ----------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Reject strategies that handle mixed precision themselves. Make ``fp32_modules`` compute in fp32."""
        trainer: Any = getattr(module, "_trainer", None)
        if trainer is None:
            msg = (
                f"{self!r} is for the Trainer; in Fabric use FabricAmpPrecision({self.settings.precision!r})"
            )
            raise TypeError(msg)
        self._trainer = trainer
        self._refuse_strategy(trainer.strategy)
        if self._fits or self.session.are_all_stored:
            is_sharded = hasattr(trainer.strategy, "mixed_precision_config")  # FSDP does it later
            setting = "the strategy's mixed_precision" if is_sharded else sharded_by(module)
            refuse_sharded(self.settings.weights, setting)
            self._loads_again = self.session.set_up_weights(module, self.settings.fp32_modules)
        if self._fits:
            averages_in_fp32(trainer.callbacks, self.package, self.session.at_end)
            average_landed_steps(
                trainer.callbacks, self.package, lambda: self._landed_steps, self.session.at_end
            )
        is_overridden = self.package.utilities.model_helpers.is_overridden
        self._users_methods = users_methods(module, self, is_overridden)
        return super().convert_module(module)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[LRSchedulerConfig]
    ) -> tuple[nn.Module, list[Optimizer], list[LRSchedulerConfig]]:
        """Begin the run on the model's device.

        Register optimizers, and hold back schedulers after skipped steps.
        """
        self._start(self._trainer.strategy.root_device.type, scaler_groups(model))
        is_fsdp1 = isinstance(model, FullyShardedDataParallel)
        self.checkpoint_key = "FSDPPrecision" if is_fsdp1 else "MixedPrecision"
        if self._fits:
            self._check_shards(model)
        self.session.add([model], optimizers, [model])
        self._take_schedulers(lr_schedulers)
        self.session.at_end.callback(self._take_schedulers, [])
        if self._scaler.is_enabled() and self._is_manual:
            self.session.origins.watch(param for optimizer in optimizers for param in params_of(optimizer))
        return model, optimizers, lr_schedulers

    def _take_schedulers(self, configs: Sequence[LRSchedulerConfig]) -> None:
        """After skipped steps, hold back the schedulers in ``configs`` and no other schedulers."""
        release_schedulers(self._schedulers)
        self._schedulers = scheduled_after_steps(configs, self.step_log)

    def teardown(self) -> None:
        """End the run, with a warning if all of its steps were skipped."""
        has_failed = self._trainer is not None and self._trainer.state.status == "interrupted"
        self.session.end(warn=None if has_failed else self._warn)
        self._trainer = None

    @property
    def measures_norms(self) -> bool:
        """Whether gradient norms are measured even without clipping."""
        return self.session.measures_norms

    # -- the autocast region ---------------

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Run ``training_step`` under autocast.

        With manual optimization, the iteration ends when ``training_step`` returns.
        """
        with self.forward_context():
            yield
        self._scaler.end_iteration()

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Run ``validation_step`` in the evaluation precision."""
        in_eval = self.session.eval_precision
        if in_eval == self.session.precision:
            return self.forward_context()
        return self.session.region(in_eval, cache_enabled=self.shares_casts)

    test_step_context = val_step_context
    predict_step_context = val_step_context

    def _outside_region(self) -> AbstractContextManager[Any]:
        """With manual optimization, turn autocast off for the backward pass, hooks and optimizer step."""
        return self.session.no_region() if self._is_in_region() else nullcontext()

    def _is_in_region(self) -> bool:
        return bool(self.device) and torch.is_autocast_enabled(self.device)

    # -- backward --------------------------

    @outside_graphs
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call ``on_before_backward`` with the unscaled loss, then scale the loss."""
        with self._outside_region():
            loss: Tensor = self._plain.pre_backward(self, tensor, module)
            return self._scaler.scale(loss)

    @outside_graphs
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward without autocast."""
        with self._outside_region(), self.session.origins.inside(), anomalies_explained(self._scaler):
            self._plain.backward(self, tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Run ``on_after_backward`` without autocast."""
        with self._outside_region():
            loss: Tensor = self._plain.post_backward(self, tensor, module)
            return loss

    # -- step ------------------------------

    @outside_graphs
    def optimizer_step(
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, call hooks, clip, and step or skip. Return the closure's result."""
        # In manual optimization, training_step calls this method inside an autocast region.
        # The closure then also runs inside an autocast region, but the optimizer steps outside of it.
        if self._is_in_region():
            closure = self._in_region(closure)
        closure = partial(self._closure_and_hooks, optimizer, model, closure)
        with self._outside_region():
            output = self._step(model.trainer, optimizer, closure, **kwargs)
            self.session.count_step()  # not reached if the closure raised
            hold_schedulers(self._schedulers, optimizer, self.step_log)
            self._landed_steps += self.landed(optimizer, wait=False)
            return output

    def _step(self, trainer: Any, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure and step.

        If the loss is not scaled, or if the optimizer may call its closure several times, the closure runs
        inside ``optimizer.step()``. Otherwise, the closure runs once, before ``optimizer.step()``.
        """
        scaler = self._scaler
        if not scaler.is_enabled():
            return self._take(trainer, optimizer, closure, **kwargs)
        if calls_closure_again(optimizer):
            if scaler.core.state(optimizer).overflowed_before_closure(optimizer):
                # A skipped step does not call the closure, but the Trainer expects a call for each batch.
                closure()
            output = self._take(trainer, optimizer, closure, **kwargs)
        else:
            output = closure()
            self._take(trainer, optimizer, None, **kwargs)
        scaler.update()
        return output

    def _in_region(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with self.forward_context():
                return closure()

        return call

    def _take(
        self, trainer: Any, optimizer: Optimizer, closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Take the optimizer step.

        If the Trainer clips gradients, and no user code runs between clipping and the step, one pass over the
        gradients does both.
        """
        max_norm = self._max_norm_of_step(trainer)
        if max_norm is None:
            return self._scaler.step(optimizer, **({} if closure is None else {"closure": closure}), **kwargs)
        outputs: list[Any] = []
        run = None if closure is None else lambda: outputs.append(closure()) or outputs[-1]  # type: ignore[func-returns-value]
        self._scaler.clip_and_step(optimizer, max_norm, closure=run)
        return outputs[-1] if outputs else None

    def _max_norm_of_step(self, trainer: Any) -> float | None:
        """Return the maximum gradient norm if the step itself clips, else None."""
        is_by_norm = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
        if self._is_manual or not is_by_norm or not self._users_methods <= NOT_AFTER_CLIPPING:
            return None
        # If the user has replaced the scaler, call the step and clip methods of the new scaler.
        if type(self._scaler) is not GradScaler:
            return None
        return float(trainer.gradient_clip_val)

    def _closure_and_hooks(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any]) -> Any:
        """Run forward and backward, then call hooks and clip gradients.

        If the user's methods may read the gradients, the gradients are unscaled after the backward pass.
        """
        result = closure()
        scaler, trainer, is_seen = self._scaler, model.trainer, bool(self._users_methods)
        if scaler.is_enabled():
            if self._is_manual:
                refuse_strays(self.session.origins, optimizer, scaler)
            if is_seen and scaler.core.has_scaled:
                scaler.core.ensure_unscaled(optimizer)
        elif self.session.measures_norms:
            by_value = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
            if is_seen or by_value or self.settings.on_nonfinite == "ignore":
                scaler.core.measure(optimizer)  # before they are clipped
        self._after_closure(model, optimizer)  # type: ignore[attr-defined] # Lightning's method
        return result

    # -- clipping --------------------------

    def _clip_gradients(self, model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip as Lightning does, unless the optimizer step itself clips."""
        if self._max_norm_of_step(model.trainer) is None:
            super()._clip_gradients(model, optimizer, *args, **kwargs)  # type: ignore[misc] # Lightning's method

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip the unscaled gradients by norm or by value, including for fused optimizers."""
        self._plain.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the total norm of an optimizer's unscaled gradients."""
        optimizer = torch_optimizer(optimizer)
        if self._clips_as_stock(optimizer):
            self._plain.clip_grad_by_norm(self, optimizer, clip_val)
        else:
            self._scaler.clip_grad_norm_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of an optimizer's unscaled gradients."""
        optimizer = torch_optimizer(optimizer)
        if self._clips_as_stock(optimizer):
            self._plain.clip_grad_by_value(self, optimizer, clip_val)
        else:
            self._scaler.clip_grad_value_(optimizer, clip_val)

    def _clips_as_stock(self, optimizer: Optimizer) -> bool:
        """Return whether Lightning's own clipping is used.

        Lightning's clipping is used if no loss has been scaled so far, or if the user overrides
        ``main_params``.
        """
        core = self._scaler.core
        if self._scaler.is_enabled() and not core.has_scaled:
            return any(param.grad is not None for param in params_of(optimizer))  # torch's clip needs one
        if "main_params" not in self._users_methods:
            return False
        self._scaler.core.ensure_unscaled(optimizer)
        return True

    @property
    def _plain(self) -> Any:
        """Lightning's base class Precision, whose hooks do not scale the loss."""
        return self.package.plugins.Precision

    # -- checkpoints -----------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state under the key of Lightning's own plugin, which can then load the checkpoint."""
        payload = checkpoint.pop(type(self).__qualname__, None)
        if payload:
            # Lightning's own plugin fails to load a state that contains no loss scale.
            # Therefore a state that contains no loss scale is saved under a separate key.
            checkpoint[self.checkpoint_key if "scale" in payload else OUR_KEY] = payload

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """To resume training, load the loss scale saved by this or another precision plugin."""
        # By now the weights have their storage format, so loading the checkpoint again does not round them.
        if self._loads_again:
            trainer, self._loads_again = self._trainer, False
            module = trainer.lightning_module
            trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
            for callback in trainer.callbacks:
                if isinstance(callback, self.package.callbacks.WeightAveraging):
                    callback.on_load_checkpoint(trainer, module, checkpoint)
        if self._fits:
            keys = (*STOCK_KEYS, OUR_KEY)
            self.load_state_dict(next((checkpoint[key] for key in keys if checkpoint.get(key)), {}))
