"""AmpAccelerator is Accelerate's Accelerator with the autocast and the GradScaler of amp_plugin."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import SCALER_NAME, AutocastKwargs, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate import deepspeed
from amp_plugin.adapters.accelerate.forward import MixedForward, fp32_units_apart, give_policy
from amp_plugin.adapters.accelerate.optimizer import AmpOptimizer, steps_in_backward
from amp_plugin.adapters.accelerate.settings import (
    accelerators_arguments,
    format_asked,
    refuse_misplaced,
    refuse_other_engine,
    take_options,
)
from amp_plugin.adapters.scaler import anomalies_explained, scaler_groups, torch_optimizer
from amp_plugin.adapters.session import EntryPoint
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.casting.threads import RegionState
from amp_plugin.formats.layers import LayerFormats, leave_out
from amp_plugin.kernels.tracers import outside_graphs
from amp_plugin.messages import warn_user
from amp_plugin.options import AccelerateOptions, bind, shows
from amp_plugin.patches import replaced
from amp_plugin.patterns import found_patterns, matched_modules, require_matches
from amp_plugin.precision import TRAINING_DTYPES
from amp_plugin.removed import removed_attribute
from amp_plugin.scaling.gradients import params_of
from amp_plugin.scaling.words import Words
from amp_plugin.weights.ddp import reduce_in_fp32, refuse_sharded
from amp_plugin.weights.store import restore_weights

Parameters = Optimizer | Tensor | Iterable[Tensor]
_SPIKES_NAME = "amp_plugin.json"
_SIGNATURE = inspect.signature(Accelerator.__init__)


class AmpAccelerator(EntryPoint, Accelerator):
    """A drop-in replacement for ``accelerate.Accelerator``. Only the import changes.

    ``mixed_precision="fp16"`` means float16 with a loss scale on every device, including the CPU. Other names
    of precisions are accepted too, such as ``"fp32"`` for ``"no"``, and ``"16-mixed"``.

    Gradients are clipped correctly for any set of parameters, even if a step makes several clipping calls.
    Within an accumulation window, clipping does nothing. Several optimizers, closures, and optimizers without
    gradients are supported. Without a GPU, the processes that torchrun starts form a process group on the
    CPU.

    Under DeepSpeed, the options are translated into DeepSpeed config keys. Under Megatron-LM and XLA, a
    precision other than ``"no"`` raises an error. Requesting an fp8 library other than torchao also raises an
    error.

    Args:
        *args: the arguments of Accelerator.
        **kwargs: the keyword arguments of Accelerator. ``kwargs_handlers`` may contain an AmpKwargs.

    Attributes:
        scaler: the ``amp_plugin.GradScaler`` in fp16, otherwise None. It can be replaced. If a
            ``torch.amp.GradScaler`` is assigned, a new ``amp_plugin.GradScaler`` gets its options and state.
            If None is assigned, no loss is scaled.

    Raises:
        TypeError: an argument is unknown.
        ValueError: an option or ``mixed_precision`` has an invalid value. The error message names the source
            of the invalid value. ValueError is also raised if an option requires amp_plugin, but an engine
            such as XLA handles mixed precision itself.

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

    if not TYPE_CHECKING:
        __getattr__ = removed_attribute

    words = Words(
        backward="accelerator.backward(loss)",
        unscale="accelerator.unscale_gradients(optimizer)",
        step="optimizer.step()",
        prepare="accelerator.prepare(optimizer)",
        bf16="use mixed_precision='bf16'",
        endless="AmpKwargs(max_skips_in_a_row=...)",
        reduce="DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)",
    )

    native_amp: bool

    @shows(accelerators_arguments, _SIGNATURE)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_misplaced(type(self).__name__, kwargs)
        given = bind(type(self).__name__, _SIGNATURE, self, *args, **kwargs)
        given.pop("self")
        asked_format = format_asked(given.get("mixed_precision"), os.environ)
        options, sources, enabled = take_options(given, os.environ)
        self._open_session(options, sources=sources, enabled=enabled)
        # The object that the public attribute ``scaler`` returns.
        self._shown: Any = None
        super().__init__(**given)
        is_other = refuse_other_engine(
            self.distributed_type, self.mixed_precision, self.ao_recipe_handler, sources
        )
        below = asked_format or self.session.options.formats
        if below and (is_other or self.distributed_type == DistributedType.DEEPSPEED):
            msg = (
                f"{below!r}: {self.distributed_type.value} computes by itself, and its layers cannot be "
                "converted; use mixed_precision='bf16' without formats"
            )
            raise ValueError(msg)
        if self.distributed_type == DistributedType.DEEPSPEED:
            deepspeed.translate(self.session, self.deepspeed_plugin.deepspeed_config)
        elif not is_other:
            self._engage(asked_format or self.mixed_precision)
        self.register_load_state_pre_hook(self._load_scale)
        self.register_save_state_pre_hook(self._save_spikes)

    def _engage(self, asked: str) -> None:
        """Replace Accelerate's scaler with an ``amp_plugin.GradScaler``, and apply this run's op rules.

        ``asked`` is Accelerate's precision, or the format below 16 bits that the user asked for.
        """
        session, device, precision = self.session, self.device.type, self.mixed_precision
        recipe = self.ao_recipe_handler
        session.compute_in(
            "fp32" if asked == "no" else asked, named="mixed_precision", converts=recipe is None
        )
        self.native_amp = precision != "no"
        if recipe is not None:
            if session.options.emulate:
                recipe.config = dataclasses.replace(recipe.config, emulate=True)
            LayerFormats(default="fp8", recipe=recipe.config).refuse_device(device)
        session.begin(device, follows_default=session.changes_forward, is_first_rank=self.is_main_process)
        self._show(session.scaler if precision == "fp16" else None)
        if self.distributed_type == DistributedType.FSDP:
            weights, outputs = session.options.weights, self._options.fp32_outputs
            if self._is_fsdp1:
                refuse_sharded(weights, "FullyShardedDataParallelPlugin(mixed_precision_policy=...)")
            session.check_sharded()
            if self.native_amp:
                give_policy(self.state.fsdp_plugin, self.dtype_plan, fp32_outputs=outputs)

    @property
    def _engaged(self) -> bool:
        """Whether amp_plugin does the casting and stepping, rather than an engine such as DeepSpeed."""
        return bool(self.session.device)

    def _show(self, scaler: Any) -> None:
        """Set the public attribute ``scaler`` on the Accelerator and on its prepared optimizers.

        None means that no loss is scaled.
        """
        self._shown = scaler
        for optimizer in self._optimizers:
            optimizer.scaler = scaler

    @property
    def _options(self) -> AccelerateOptions:
        return cast("AccelerateOptions", self.session.options)

    @property
    def scaler(self) -> Any:
        """The scaler; None if no loss is scaled.

        The scaler can be replaced by another ``amp_plugin.GradScaler``, or by an object with all of its
        methods. If a ``torch.amp.GradScaler`` is assigned, a new ``amp_plugin.GradScaler`` gets its options
        and state.

        Raises:
            TypeError: the assigned value is something else.
        """
        return self._shown

    @scaler.setter
    def scaler(self, given: Any) -> None:
        if not self._engaged:
            self._shown = given
            return
        self.session.replace_scaler(given, f"{type(self).__name__}.scaler")
        self._show(None if given is None else self._scaler)
        self._register_optimizers()

    @property
    def _is_fsdp1(self) -> bool:
        return self.distributed_type == DistributedType.FSDP and not self.is_fsdp2

    # -- preparing -------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerator does, and pass the parameter names to the scaler."""
        if not self._engaged:
            return self._prepare_engine(*args, **kwargs)
        models, before = [module for module in args if isinstance(module, nn.Module)], len(self._models)
        self._set_up(models)
        apart = self.native_amp and self.is_fsdp2
        with fp32_units_apart(models, self.dtype_plan) if apart else nullcontext():
            prepared = super().prepare(*args, **kwargs)
        # Accelerate matches FSDP2's weights by memory address, so they are converted only after prepare().
        for model in self._models[before:] if self.is_fsdp2 else ():
            self.session.set_up_weights(model, found_patterns(model, self._options.fp32_modules))
        if self.native_amp:
            for model in self._models[before:]:
                self.session.check_shards(model)
        self._register_optimizers()
        self._follow_on_page()
        return prepared

    def _prepare_engine(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare with another engine.

        Under DeepSpeed, also create a scaler for the engine to use, or one that logs the engine's steps.
        """
        for optimizer in args:
            # DeepSpeedOptimizerWrapper looks for the attribute "overflow" when it is created.
            if isinstance(optimizer, Optimizer):
                optimizer.overflow = False  # type: ignore[attr-defined]
        prepared = super().prepare(*args, **kwargs)
        if self._engine is not None and not self._scaler.core.optimizers:
            config = self.deepspeed_plugin.deepspeed_config
            self.session.follow(self.session.rules)
            scaler = deepspeed.scaler_for_engine(self._engine, self.session, config)
            self.session.take_scaler(scaler)
            self._show(scaler if scaler.is_enabled() else None)
        return prepared

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, or None."""
        return getattr(getattr(self, "deepspeed_engine_wrapped", None), "engine", None)

    @property
    def _scaling_engine(self) -> Any:
        """DeepSpeed's engine if it scales losses and skips steps itself, or None."""
        engine = self._engine
        is_ours = engine is None or deepspeed.is_ours(self.deepspeed_plugin.deepspeed_config)
        return None if is_ours else engine

    def _follow_on_page(self) -> None:
        """Write a run page (an HTML report) about the prepared models, until ``end_training()`` is called."""
        path = self._options.report
        if path is not None and self._models:
            self.session.watch([self.unwrap_model(model) for model in self._models], path)

    def _set_up(self, models: Sequence[nn.Module], *, trained: bool = True) -> None:
        """Convert weights to their storage format, make ``fp32_modules`` compute in fp32, and use autocast.

        ``_set_up`` may be called several times for a model.
        """
        wanted = self._options.fp32_modules
        matched = {model: found_patterns(model, wanted) for model in models}
        found = {name for model in self.session.models for name in found_patterns(model, wanted)}
        if models:
            require_matches(models, [name for name in wanted if name not in found])
            self.session.formats.require([*self.session.models, *models])
        for model, patterns in matched.items():
            if trained and not self.is_fsdp2:
                self.session.set_up_weights(model, patterns)
            in_fp32 = apply_fp32_modules(model, patterns)
            formats = self.session.formats
            left_out = [*in_fp32, *matched_modules(model, formats.patterns)]
            if left_out and self.ao_recipe_handler is not None:
                leave_out(self.ao_recipe_handler, model, left_out)
            if trained:
                formats.convert(model, in_fp32)
            if self.session.changes_forward and not getattr(model, "_is_accelerate_prepared", False):
                training = self._region(self.mixed_precision)
                MixedForward(
                    module=model,
                    training=training,
                    evaluation=self._region(self.session.eval_precision),
                    fp32_outputs=self._options.fp32_outputs,
                    inputs=training.dtype if self.session.replaces_autocast else None,
                ).put_on()

    def set_up_weights(self, model: nn.Module) -> None:
        """Convert the weights of an unprepared model to their storage format.

        A checkpoint that is loaded after the conversion is not rounded to the old dtype.
        """
        if self._engaged and not getattr(model, "_is_accelerate_prepared", False):
            self.session.set_up_weights(model, found_patterns(model, self._options.fp32_modules))

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model so that its forward pass runs under autocast and returns fp32 outputs."""
        if self._engaged and not getattr(model, "_is_accelerate_prepared", False):
            evaluated = kwargs.get("evaluation_mode", len(args) > 1 and args[1])
            self._set_up([model], trained=not evaluated)
        # If native_amp is on, Accelerator.prepare_model sets a forward that cannot be copied.
        with replaced(self, "native_amp", False):
            prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        reduce_in_fp32(prepared)
        return prepared

    def _region(self, precision: str, of_block: AutocastKwargs | None = None) -> RegionState:
        """Return the autocast state for a precision, either for models or for a block with AutocastKwargs."""
        handler = of_block or self.autocast_handler or AutocastKwargs()
        mixed = precision in {"fp16", "bf16", "fp8"}
        runs = of_block is not None or (mixed and not self.session.replaces_autocast)
        return RegionState(
            device_type=self.device.type,
            dtype=TRAINING_DTYPES[precision] if mixed else torch.bfloat16,
            enabled=handler.enabled and runs,
            cache_enabled=handler.cache_enabled,
        )

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        """Prepare an optimizer: it steps through the scaler."""
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if not self._engaged or isinstance(prepared, AmpOptimizer) or steps_in_backward(prepared.optimizer):
            return prepared
        prepared.__class__, prepared.session = AmpOptimizer, self.session
        if not self.is_fsdp2:  # FSDP2 replaces its parameters later
            self.session.add(self._models, [prepared.optimizer])
        return prepared

    def _register_optimizers(self) -> None:
        """Pass the process groups and the names of the parameters to the scaler."""
        groups = scaler_groups(*self._models)
        if groups:
            self.session.place(groups)
        named = [self.unwrap_model(model) for model in self._models]
        self.session.add(self._models, self._optimizers, named)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model without its distributed wrapper.

        With ``keep_fp32_wrapper=False`` the model becomes an ordinary float32 model, and can no longer be
        trained under DDP.
        """
        inner: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper:
            restore_weights(inner)
        return inner

    # -- forward and backward --------------

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block under the same autocast as prepared models.

        If ``mixed_precision`` is ``"no"``, the context does nothing.
        """
        region = self._region(self.mixed_precision, autocast_handler)
        with region.region() if self.native_amp else nullcontext():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss and run backward, as Accelerator does.

        If an optimizer of a prepared model was not prepared itself, the optimizer's ``step()`` raises an
        error, because the gradients are still multiplied by the loss scale.
        """
        if self._engaged and not self._scaler.is_enabled():
            self._scaler.core.note_loss(loss.detach() / self.gradient_accumulation_steps)
            super().backward(loss, **kwargs)
        else:
            self._watched_backward(loss, **kwargs)

    @outside_graphs
    def _watched_backward(self, loss: Tensor, **kwargs: Any) -> None:
        models = self._models if self._engaged else []
        engine = self._scaling_engine
        noted = nullcontext() if engine is None else deepspeed.steps_noted(engine, self._scaler)
        with noted, self.session.watching(models), anomalies_explained(self._scaler):
            super().backward(loss, **kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch.

        The loss scale may change after the last micro-batch of an accumulation window.
        """
        with super().accumulate(*models):
            yield
        if self.sync_gradients:
            self._scaler.end_iteration()

    # -- gradients -------------------------

    @outside_graphs
    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale the gradients of the given optimizers.

        By default, the gradients of all prepared optimizers are unscaled. A second call does nothing.
        """
        given: Any = self._optimizers if optimizer is None else optimizer
        for prepared in given if isinstance(given, list | tuple) else [given]:
            if self._engaged:
                self._scaler.core.ensure_unscaled(torch_optimizer(prepared))

    @outside_graphs
    def clip_grad_norm_(self, parameters: Parameters, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the norm of the unscaled gradients, but only at the end of an accumulation window.

        Args:
            parameters: the parameters of one or several optimizers. A prepared optimizer is accepted too.
            max_norm: the largest norm.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping (fp32, 0-dim). Within an accumulation window nothing is clipped, and the
            result is the norm of the gradients so far. Under FSDP the result is nan within an accumulation
            window, because gradients are not reduced yet.
        """
        params = _parameters_of(parameters)
        if not self._engaged:
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[no-any-return]
        scaler, is_fsdp1 = self._scaler, self._is_fsdp1
        if not self.sync_gradients:
            if self.distributed_type == DistributedType.FSDP:
                return torch.full((), torch.nan)
            so_far = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
            scale = scaler.loss_scale.value
            return so_far if scale is None else so_far / scale
        if not is_fsdp1 and scaler.is_enabled():
            return scaler.clip_grad_norm_(params, max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(params, max_norm, norm_type)
        for optimizer in scaler.core.optimizers_of(params):
            scaler.core.measure(optimizer, norm)
        return norm

    @outside_graphs
    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip each element of the unscaled gradients, but only at the end of an accumulation window.

        Args:
            parameters: as for :meth:`clip_grad_norm_`.
            clip_value: the largest absolute value.
        """
        params = _parameters_of(parameters)
        if not self._engaged or self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(params, clip_value)
        elif self.sync_gradients:
            self._scaler.clip_grad_value_(params, clip_value)

    # -- results of steps ------------------

    def amp_metrics(self) -> dict[str, float | int]:
        """Return ``loss_scale`` and ``skipped_steps`` for ``accelerator.log``. The host waits for the device.

        If no loss is scaled, ``loss_scale`` is 1.0. Logging does not apply a pending update of the loss
        scale, so it changes no gradients.
        """
        scaler, engine = self._scaler, self._scaling_engine
        # ``get_scale()`` would apply a pending update of the loss scale, so ``loss_scale`` is read instead.
        scale = 1.0 if engine is None else deepspeed.scale_of(engine)
        if scaler.is_enabled():
            scale = scaler.loss_scale.item()
        return {"loss_scale": scale, "skipped_steps": scaler.skipped_steps()}

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log values to all trackers, and add the loss scale, skips and norms of new optimizer steps.

        Args:
            values: the values to log. Values named ``loss_scale``, ``skipped_steps`` or ``grad_norm`` replace
                those of amp_plugin.
            *args: further arguments of Accelerator.
            **kwargs: further arguments of Accelerator.
        """
        return super().log({**self.metrics_since_log(), **values}, *args, **kwargs)

    def metrics_since_log(self) -> dict[str, float | int]:
        """Return :meth:`amp_metrics` and ``grad_norm`` if optimizers have stepped since the last call.

        If no loss is scaled, ``loss_scale`` is left out. ``grad_norm`` is the norm of the unscaled gradients
        before clipping. After an overflow it is inf or nan. If there are several optimizers, the keys are
        ``grad_norm/0``, ``grad_norm/1`` and so on, in the order in which the optimizers were prepared. The
        host waits for the device. If no optimizer has stepped since the last call, the result is empty.
        """
        norms = self.session.new_norms(self._optimizers)
        if norms is None:
            return {}
        metrics = {**self.amp_metrics(), **{name: norm.item() for name, norm in norms.items()}}
        if not self.session.scales_loss:
            del metrics["loss_scale"]
        return metrics

    # -- checkpoints and the end -----------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerator does.

        If Accelerator steps optimizers only to create their state, these steps bypass the scaler.
        """
        with self.session.aside():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerator does.

        If the checkpoint has no loss scale, warn and keep the current loss scale.
        """
        # Accelerate fails if it sees a scaler and scaler.pt is missing. Therefore the scaler is hidden.
        with self.session.aside(), replaced(self, "_shown", None):
            super().load_state(*args, **kwargs)

    def _save_spikes(self, _: list[Any], __: list[Any], folder: str) -> None:
        """Save the statistics of ``on_spike`` if no scaler is saved. This is a hook for Accelerate."""
        state = {} if self._scaler.is_enabled() or not self._engaged else self.session.state_dict()
        if state and self.is_main_process:
            Path(folder, _SPIKES_NAME).write_text(json.dumps(state))

    def _load_scale(self, _: list[Any], folder: str) -> None:
        """Load the loss scale from the folder that ``load_state`` has chosen. Accelerate calls this hook."""
        file = Path(folder, SCALER_NAME)
        if self._scaler.is_enabled() and file.is_file():
            self._scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif self._scaler.is_enabled():
            warn_user(
                f"the checkpoint {folder} has no {SCALER_NAME}, because it was not saved in fp16; the "
                f"loss scale stays at {self._scaler.get_scale():.10g}"
            )
        spikes = Path(folder, _SPIKES_NAME)
        if spikes.is_file():
            self.session.load_state_dict(json.loads(spikes.read_text()))
        in_shards = self._is_fsdp1 and self.state.fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT"
        if in_shards and not all(optimizer.state for optimizer in self._optimizers):
            warn_user(
                f"the optimizer state in {folder} is not loaded, and the optimizer starts without state: "
                "FSDP1 cannot load a sharded checkpoint into a new optimizer; fsdp_version=2 can"
            )

    def end_training(self) -> None:
        """End the run.

        Models are converted back to float32, and ``torch.autocast`` uses torch's kernels again.

        Warns if all steps were skipped.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
            # gloo's threads need the GIL to free their last tensors.
            # torch holds the GIL while it waits for gloo's threads.
            # A process is aborted if it ends before gloo's threads do.
            time.sleep(0.1)
        super().end_training()
        self.session.end(warn=self.on_main_process(warn_user))


def _parameters_of(given: Parameters) -> list[Tensor]:
    if isinstance(given, Optimizer):
        return list(params_of(given))
    return [given] if isinstance(given, Tensor) else list(given)
