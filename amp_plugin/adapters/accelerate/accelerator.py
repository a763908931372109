"""AmpAccelerator: Accelerate's Accelerator on amp_plugin's autocast and GradScaler."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.accelerate import checkpoints, clipping, engagement, sharding
from amp_plugin.adapters.accelerate.clipping import Parameters
from amp_plugin.adapters.accelerate.forward import MixedForward, RegionOptions
from amp_plugin.adapters.accelerate.optimizer import (
    AmpOptimizer,
    Iteration,
    steps_in_backward,
    torch_optimizer,
)
from amp_plugin.adapters.accelerate.preparation import Preparation
from amp_plugin.adapters.accelerate.refusals import refuse_before_backward
from amp_plugin.adapters.accelerate.settings import AmpKwargs, refuse_misplaced, resolve
from amp_plugin.adapters.accelerate.step_metrics import StepMetrics, scale_and_skips
from amp_plugin.adapters.endless_skips import explanation, refuse_endless_skips
from amp_plugin.adapters.float8 import refuse_device
from amp_plugin.adapters.given_scaler import scaler_for
from amp_plugin.adapters.parameter_names import names_in, names_of
from amp_plugin.casting.dispatcher import set_default_rules
from amp_plugin.device_speed import warn_of_slow_fp16
from amp_plugin.options import refuse_misfits
from amp_plugin.patterns import found_patterns
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.penalty import grad, gradient_penalty
from amp_plugin.scaling.step_log import LoggedStep
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.weights.store import restore_weights

T = TypeVar("T")
_SIGNATURE = inspect.signature(Accelerator.__init__)


class AmpAccelerator(Accelerator):
    """A drop-in for ``accelerate.Accelerator``: change the import, nothing else.

    ``mixed_precision="fp16"`` is float16 with a loss scale on every device, the CPU included; names such
    as ``"fp32"`` (for ``"no"``) and ``"16-mixed"`` are understood. Clipping
    is right for any parameters, any number of times, and does nothing within an accumulation window;
    several optimizers, closures and optimizers without gradients work. Processes started by torchrun
    without a GPU form a group on the CPU. DeepSpeed, Megatron-LM, XLA
    and fp8 by other means than torchao are left to Accelerate.

    Args:
        *args: Accelerator's.
        **kwargs: Accelerator's; ``kwargs_handlers`` may hold AmpKwargs.

    Attributes:
        scaler: the ``amp_plugin.GradScaler``; None unless fp16. Another GradScaler may be put in its place,
            torch's own or None too; what is not ours is driven as Accelerate drives it.

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
        refuse_misplaced(type(self).__name__, kwargs)
        refuse_misfits(type(self).__name__, _SIGNATURE, args, kwargs)
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        handlers = list(given.get("kwargs_handlers") or ())
        self._settings = resolve(handlers, os.environ)
        self._options = self._settings.adapter()
        given["mixed_precision"] = engagement.precision_for_accelerate(
            given.get("mixed_precision"), os.environ
        )
        given["kwargs_handlers"] = [other for other in handlers if not isinstance(other, AmpKwargs)]
        given.pop("self")
        given["cpu"] = given.get("cpu", False) or engagement.ranks_without_gpu(os.environ)
        self._grad_scaler = GradScaler("cpu", enabled=False)
        self._scaler_shown: Any = None
        self._iteration = Iteration()
        self._metrics = StepMetrics()
        self._engaged = False
        self._loaded_folder: Path | None = None
        super().__init__(**given)
        explicit = len(given["kwargs_handlers"]) != len(handlers)
        self._engaged = engagement.is_ours(
            self.distributed_type,
            self.mixed_precision,
            self._settings,
            explicit=explicit,
            float8_recipe=self.ao_recipe_handler,
        )
        if self._engaged:
            self._engage()

    def _engage(self) -> None:
        """Replace Accelerate's scaler by ours and let autocast blocks follow our rules."""
        device, precision = self.device.type, self.mixed_precision
        self._take_scaler(self._own_scaler(precision))
        self._scaler_shown = self._grad_scaler if precision == "fp16" else None
        if self.is_main_process:
            warn_of_slow_fp16(precision, device)
            engagement.warn_of_missing_processes(self.num_processes, os.environ)
        self.native_amp = precision != "no"
        self._weights = engagement.model_weights(precision, self._settings, self.distributed_type)
        self._preparation = Preparation(self._weights, self._options.fp32_modules, self.ao_recipe_handler)
        self.register_load_state_pre_hook(self._remember_folder)
        checkpoints.load_into_exact_weights()
        if self.ao_recipe_handler is not None:
            refuse_device(
                f"{type(self).__name__}(mixed_precision='fp8')", device, self.ao_recipe_handler.config
            )
        if self._changes_forward:
            engagement.rules_of_blocks(device, self._settings)
        self._plan = sharding.plan_of(precision, self._settings)
        sharding.check_options(precision, self._settings, self.distributed_type)
        if self.native_amp and self.distributed_type == DistributedType.FSDP:
            sharding.give_policy(
                self.state.fsdp_plugin,
                self._plan,
                version=2 if self.is_fsdp2 else 1,
                fp32_outputs=self._options.fp32_outputs,
            )

    def _take_scaler(self, scaler: Any) -> None:
        """Step by a scaler, and look at its steps."""
        self._grad_scaler.step_log.unsubscribe(self._look)
        self._grad_scaler = scaler
        self._follow_log()

    def _follow_log(self) -> None:
        self._grad_scaler.step_log.exact = self._options.exact_schedulers
        self._grad_scaler.step_log.subscribe(self._look)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look at the steps of the copied scaler, whose log is empty."""
        self.__dict__.update(state)
        self._follow_log()

    def _own_scaler(self, precision: str) -> GradScaler:
        fsdp1 = self.state.fsdp_plugin if self._is_fsdp1 else None
        return engagement.grad_scaler(self.device.type, precision, self._settings, fsdp1)

    @property
    def scaler(self) -> Any:
        """The scaler; None where nothing is scaled.

        It may be replaced by another one, or by an object that has all of its methods. A
        ``torch.amp.GradScaler`` gives the accelerator's own scaler its options and state.

        Raises:
            TypeError: what replaces it is something else.
        """
        return self._scaler_shown

    @scaler.setter
    def scaler(self, given: Any) -> None:
        if not self._engaged:
            self._scaler_shown = given
            return
        ours = scaler_for(
            given,
            f"{type(self).__name__}.scaler",
            lambda enabled: self._own_scaler("fp16" if enabled else "no"),
        )
        self._take_scaler(ours)
        self._scaler_shown = self._grad_scaler if self._grad_scaler.is_enabled() else None
        for optimizer in self._optimizers:
            if isinstance(optimizer, AmpOptimizer):
                optimizer.follow(self._grad_scaler, scaler=self._scaler_shown)
        self._register_names()

    @property
    def _changes_forward(self) -> bool:
        """Whether prepared models compute in 16 bits, in training or in ``eval()`` mode."""
        return self.native_amp or self._options.eval_precision in {"fp16", "bf16"}

    @property
    def _is_fsdp1(self) -> bool:
        return self.distributed_type == DistributedType.FSDP and not self.is_fsdp2

    # -- preparing -------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as Accelerator does, and tell the scaler the names of the parameters."""
        if not self._engaged:
            return super().prepare(*args, **kwargs)
        models = [module for module in args if isinstance(module, nn.Module)]
        self._preparation.set_up(models)
        if self._changes_forward and self.is_fsdp2:  # Accelerate leaves autocast out there
            for model in models:
                self._mix(model)
        with ExitStack() as stack:
            stack.enter_context(self._preparation.is_over())
            if self.native_amp and self.is_fsdp2:
                stack.enter_context(sharding.fp32_units_apart(models, self._plan))
            prepared = super().prepare(*args, **kwargs)
        if self.native_amp and self.distributed_type == DistributedType.FSDP:
            sharding.check_prepared(prepared, self._plan)
        self._register_names()
        self._weights.add(self._models, map(torch_optimizer, self._optimizers))
        return prepared

    def set_up_weights(self, model: nn.Module) -> None:
        """Store a model's weights before it is prepared, for a checkpoint that is loaded before."""
        if self._engaged and not getattr(model, "_is_accelerate_prepared", False):
            self._weights.set_up(model, found_patterns(model, self._options.fp32_modules))

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of the models, for ``amp_plugin.fully_shard``."""
        return self._plan

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model: its forward runs in the region and returns fp32."""
        if not self._engaged:
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[no-any-return]
        if not getattr(model, "_is_accelerate_prepared", False):
            evaluated = kwargs.get("evaluation_mode", len(args) > 1 and args[1])
            self._preparation.set_up([model], trained=not evaluated)
            if self._changes_forward:
                self._mix(model)
        with self._shown_to_accelerate(native_amp=False):  # its own wrapper stays off
            prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        self._weights.wrap(prepared)
        return prepared

    def _mix(self, module: nn.Module) -> None:
        training = self._region(self.mixed_precision)
        in_eval = self._options.eval_precision
        MixedForward.put_on(module, training, self._region(in_eval) if in_eval else None)

    def _region(self, precision: str) -> RegionOptions:
        options = engagement.region_options(
            self.device.type, precision, self._settings, self.autocast_handler
        )
        in_16_bits = self._weights.replace_autocast
        return replace(options, enabled=options.enabled and not in_16_bits, all_in_16_bits=in_16_bits)

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        """Prepare an optimizer: it steps through the scaler."""
        if not self._engaged:
            return super().prepare_optimizer(optimizer, *args, **kwargs)
        with self._shown_to_accelerate(_scaler_shown=None):
            prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if isinstance(prepared, AmpOptimizer) or steps_in_backward(torch_optimizer(prepared)):
            return prepared
        ours = AmpOptimizer.adopt(prepared, self._grad_scaler, self._iteration, scaler=self._scaler_shown)
        if not self.is_fsdp2:  # its parameters are yet to be replaced there
            self._grad_scaler.register(ours.optimizer)
            self._weights.add(self._models, [ours.optimizer])
        return ours

    def _register_names(self) -> None:
        named = names_in([self.unwrap_model(model) for model in self._models])
        for optimizer in map(torch_optimizer, self._optimizers):
            self._grad_scaler.register(optimizer, names=names_of(optimizer, named))

    @contextmanager
    def _shown_to_accelerate(self, **attributes: Any) -> Iterator[None]:
        """Let Accelerate's own code see attributes as given, so that it leaves to us what they control."""
        own = {name: getattr(self, name) for name in attributes}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            self.__dict__.update(own)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model without its distributed wrapper.

        Without ``keep_fp32_wrapper`` it is an ordinary float32 model again, which ends training under DDP.
        """
        inner: nn.Module = super().unwrap_model(model, keep_torch_compile=keep_torch_compile)
        if not keep_fp32_wrapper:
            restore_weights(inner)
            for module in (inner, getattr(inner, "_orig_mod", inner)):
                MixedForward.take_off(module)
        return inner

    # -- forward and backward --------------------------------------------------------------------

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run a block in the region of prepared models; nothing happens with ``mixed_precision="no"``."""
        with ExitStack() as stack:
            if not self._engaged:
                stack.enter_context(super().autocast(autocast_handler))
            elif self.native_amp:
                stack.enter_context(self._region(self.mixed_precision).with_kwargs(autocast_handler).region())
            yield

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch; the last one of a window ends the iteration: the loss scale may change."""
        with super().accumulate(*models):
            yield
        if self._engaged and self.sync_gradients:
            self._grad_scaler.end_iteration()

    def recorded(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run forward and backward passes so that they can be run again, should every step be skipped.

        The error that ends such a run (``max_skips_in_a_row``) then names the op that made the first number
        which is not finite. Nothing is kept but while steps are being skipped.

        Args:
            call: computes the loss and calls :meth:`backward`; takes no step.
            *args: for ``call``.
            **kwargs: for ``call``.

        Returns:
            What ``call`` returns.
        """
        again = partial(call, *args, **kwargs)
        self._grad_scaler.step_log.remember(again)
        return again()

    def _look(self, step: LoggedStep) -> None:
        """End a run that only skips."""
        refuse_endless_skips(
            step,
            self._options.max_skips_in_a_row,
            in_fp16="use mixed_precision='bf16'",
            option="AmpKwargs(max_skips_in_a_row=...)",
            explain=self._explain,
        )

    def _explain(self, step: LoggedStep) -> str:
        models = [self.unwrap_model(model) for model in self._models]
        params = [param for model in models for param in model.parameters()]
        model = models[0] if len(models) == 1 else None
        return explanation(self._grad_scaler.step_log, step, params, model)

    # -- gradients -------------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Unscale the gradients of the given optimizers, of all by default; may be repeated."""
        if not self._engaged:
            super().unscale_gradients(optimizer)
            return
        refuse_before_backward(self._grad_scaler, "unscale_gradients()")
        given: Any = self._optimizers if optimizer is None else optimizer
        for prepared in given if isinstance(given, list | tuple) else [given]:
            self._grad_scaler.ensure_unscaled(torch_optimizer(prepared))

    def clip_grad_norm_(self, parameters: Parameters, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the norm of unscaled gradients, at the end of an accumulation window only.

        Args:
            parameters: parameters, of one optimizer or of several, or a prepared optimizer.
            max_norm: largest norm.
            norm_type: the p of the norm.

        Returns:
            The norm before clipping, 0-dim, fp32; within a window, where nothing is clipped, that of
            the gradients so far (under FSDP nan: they are not reduced yet).
        """
        params = clipping.parameters_of(parameters)
        if not self._engaged:
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[no-any-return]
        if not self.sync_gradients:
            if self.distributed_type == DistributedType.FSDP:
                return torch.full((), torch.nan)
            return clipping.norm_so_far(self._grad_scaler, params, norm_type)
        fold = self._options.fold_clip and not self._is_fsdp1
        if fold or (self._grad_scaler.is_enabled() and not self._is_fsdp1):
            return clipping.clip_norm(self._grad_scaler, params, max_norm, norm_type, fold=fold)
        norm: Tensor | None = super().clip_grad_norm_(params, max_norm, norm_type)
        clipping.note_norm(self._grad_scaler, params, norm)
        return norm

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip each element of unscaled gradients, at the end of an accumulation window only.

        Args:
            parameters: as for :meth:`clip_grad_norm_`.
            clip_value: largest absolute value.
        """
        params = clipping.parameters_of(parameters)
        if self._engaged and not self.sync_gradients:
            return
        if not self._engaged or self.distributed_type == DistributedType.FSDP:
            super().clip_grad_value_(params, clip_value)
        else:
            clipping.clip_value(self._grad_scaler, params, clip_value)

    def grad(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Differentiate as ``torch.autograd.grad``, scaled on the way: :func:`amp_plugin.scaling.grad`."""
        return grad(outputs, inputs, scaler=self._grad_scaler, **kwargs)

    def gradient_penalty(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor], **kwargs: Any
    ) -> Tensor:
        """Return a penalty to add to the loss; see :func:`amp_plugin.scaling.gradient_penalty`.

        Args:
            outputs: what to differentiate, e.g. a critic's scores.
            inputs: with respect to what.
            **kwargs: ``kind="l2"`` or ``"wgan-gp"``, ``target``.

        Returns:
            float32, 0-dim, unscaled: ``accelerator.backward(loss + 10 * penalty)``.
        """
        return gradient_penalty(outputs, inputs, scaler=self._grad_scaler, **kwargs)

    # -- what became of steps --------------------------------------------------------------------

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return what became of an optimizer's last step: skipped, norm, scale, which parameters overflowed.

        Args:
            optimizer: prepared or not.

        Returns:
            The result; where nothing is scaled (bf16, no mixed precision) both scales are 1. ``norm`` is that
            of :meth:`clip_grad_norm_` if its parameters were clipped, else that of the gradients.

        Raises:
            RuntimeError: the optimizer has not stepped yet; or another engine steps (DeepSpeed, ...).
        """
        if not self._engaged:
            msg = (
                f"last_step(): steps are left to Accelerate's own code here ({self.distributed_type}, "
                f"{self.mixed_precision}); ask accelerator.optimizer_step_was_skipped"
            )
            raise RuntimeError(msg)
        return self._grad_scaler.last_step(torch_optimizer(optimizer))

    def amp_metrics(self) -> dict[str, float | int]:
        """Return ``loss_scale`` and ``skipped_steps`` for ``accelerator.log``: a host sync.

        1.0 and 0 where nothing is scaled; empty where another engine steps (DeepSpeed, ...).
        """
        return scale_and_skips(self._grad_scaler) if self._engaged else {}

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log to all trackers as Accelerator does, after optimizer steps the loss scale, skips and norms too.

        Args:
            values: what to log; its own ``loss_scale``, ``skipped_steps`` and ``grad_norm`` are kept.
            *args: Accelerator's.
            **kwargs: Accelerator's.
        """
        return super().log({**self.metrics_since_log(), **values}, *args, **kwargs)

    def metrics_since_log(self) -> dict[str, float | int]:
        """Return :meth:`amp_metrics` and ``grad_norm`` after new optimizer steps, else nothing: a host sync.

        With several optimizers that have stepped there is a ``grad_norm/0``, ``grad_norm/1``, ... each, in
        the order they were prepared in. Before clipping, unscaled.
        """
        if not self._engaged:
            return {}
        optimizers = map(torch_optimizer, self._optimizers)
        return self._metrics.since_last_time(self._grad_scaler, optimizers)

    # -- checkpoints and the end -----------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerator does; no optimizer is stepped for it through the scaler."""
        with checkpoints.optimizers_unscaled(self._optimizers):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerator does; a checkpoint without a loss scale warns and keeps the present one."""
        if not self._engaged:
            super().load_state(*args, **kwargs)
            return
        with checkpoints.optimizers_unscaled(self._optimizers), self._shown_to_accelerate(_scaler_shown=None):
            super().load_state(*args, **kwargs)
        if self._loaded_folder is not None:
            checkpoints.load_loss_scale(self._grad_scaler, self._loaded_folder)
            if self._is_fsdp1:
                checkpoints.warn_of_lost_states(self.state.fsdp_plugin, self._optimizers, self._loaded_folder)

    def _remember_folder(self, _: list[Any], folder: str) -> None:
        """Note which folder ``load_state`` has settled on; a hook of Accelerate's."""
        self._loaded_folder = Path(folder)

    def end_training(self) -> None:
        """End the run: models are float32, torch.autocast blocks in the process torch's again."""
        super().end_training()
        if self._engaged:
            self._weights.restore()
            set_default_rules(None)
