"""What the plugins for Trainer and Fabric share: regions, the loss scale, its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_plugin.adapters.float8 import convert_linear_layers, refuse_device
from amp_plugin.adapters.given_scaler import scaler_for
from amp_plugin.adapters.lightning.settings import PrecisionSettings
from amp_plugin.adapters.model_weights import ModelWeights
from amp_plugin.adapters.option_checks import refuse_other_eval_precision
from amp_plugin.casting.dispatcher import set_default_rules
from amp_plugin.casting.region import autocast
from amp_plugin.casting.rules import OpRules, environment_rules
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.device_speed import warn_of_slow_fp16
from amp_plugin.options import LightningOptions, takes
from amp_plugin.precision import (
    TRAINING_DTYPES,
)
from amp_plugin.scaling import penalty
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.step_log import StepLog
from amp_plugin.scaling.step_result import StepResult
from amp_plugin.sharding.contradictions import check_against_plan
from amp_plugin.sharding.dtype_plan import DtypePlan
from amp_plugin.sharding.fsdp1 import add_up_in_fp32, fsdp1_policy
from amp_plugin.sharding.shard_units import is_sharded
from amp_plugin.user_warnings import warn_user

Observer = Callable[[Optimizer, StepResult], None]


class PrecisionCore:
    """State and services that do not depend on the framework.

    Attributes:
        settings: What the user asked for.
        precision: Lightning's own name for it, e.g. ``"16-mixed"``.
        device: Device type; empty until training starts if it was not given.
        observers: Called with each optimizer and the result of its step.
    """

    package: ClassVar[Any]
    """The framework: the module ``lightning.pytorch``, ``lightning.fabric``, or their like."""
    advice: ClassVar[str] = "which sets the precision itself: delete precision=... and keep this plugin"
    """What to do where a framework complains of the plugin."""
    shares_casts: ClassVar[bool] = True
    """Whether all uses of a weight in a region share one cast; their gradients then add up in 16 bits."""

    @takes(LightningOptions, by_position=1)
    def __init__(self, **given: Any) -> None:
        self.settings = settings = PrecisionSettings.from_arguments(type(self).__name__, given)
        self.precision: Any = settings.stock_name
        self.device = settings.device or ""
        self._desired_input_dtype = settings.training_dtype  # read by Lightning's throughput monitor
        self._weights = ModelWeights(settings.weights, casts=settings.precision != "fp32")
        self._begin()
        if given.get("scaler") is not None:
            self.scaler = given["scaler"]

    def _begin(self) -> None:
        """Set what a plugin begins with: an ``__init__`` of a subclass would hide the options."""
        self.observers: list[Observer] = []
        self._rules: OpRules | None = None
        self._attempted_steps = 0

    def __repr__(self) -> str:
        """Show the precision, and how weights are stored if not as usual."""
        weights = f", weights={self.settings.weights!r}" if self.settings.weights != "fp32" else ""
        return f"{type(self).__name__}({self.settings.precision!r}{weights})"

    def __format__(self, spec: str) -> str:
        """Say what to do too: Lightning's errors, such as that of two precisions, hold ``f"{plugin}"``."""
        return format(f"{self!r} ({self.advice})", spec)

    @property
    def scaler(self) -> Any:
        """The ``amp_plugin.GradScaler`` of this plugin; None unless fp16.

        It may be replaced before or between runs: by another one, or by an object that has all of its
        methods. A ``torch.amp.GradScaler`` gives the plugin's own scaler its options and state; None scales
        no loss.

        Raises:
            TypeError: what replaces it is something else, or nothing is scaled in this precision.
        """
        return self._scaler if self._scaler.is_enabled() else None

    @scaler.setter
    def scaler(self, given: Any) -> None:
        if given is not None and not self.settings.scales_loss:
            msg = (
                f"{self!r}.scaler = ...: no loss is scaled in {self.settings.precision}; "
                f"use {type(self).__name__}('fp16'), or leave the scaler out"
            )
            raise TypeError(msg)
        self._scaler = scaler_for(given, f"{type(self).__name__}.scaler", self._new_scaler)

    @cached_property
    def _scaler(self) -> GradScaler:
        """The scaler that is called; made when first used, since the native core is loaded for it."""
        return self._new_scaler(self.settings.scales_loss)

    def _new_scaler(self, enabled: bool) -> GradScaler:
        return GradScaler.from_options(
            "cpu",  # until it is placed
            self.settings.loss_scale,
            enabled=enabled,
            fp16_gradients=self.settings.fp16_gradients,
            one_pass=self.settings.one_pass,
            on_nonfinite=self.settings.on_nonfinite,
        )

    @property
    def dtype_plan(self) -> DtypePlan:
        """The dtypes of the model, for ``amp_plugin.fully_shard`` in ``configure_model``."""
        return self.settings.dtype_plan

    @property
    def mixed_precision_config(self) -> Any:
        """The policy that Lightning's FSDPStrategy gives FSDP, unless the user gave it one."""
        return fsdp1_policy(self.settings.dtype_plan)

    def _check_shards(self, model: nn.Module) -> None:
        """Compare what shards a model with the plan; let micro-batches add up in fp32.

        Raises:
            ValueError: It cannot do what was asked for.
        """
        if is_sharded(model):
            refuse_other_eval_precision(self.settings.eval_precision, self.settings.precision)
            check_against_plan(model, self.settings.dtype_plan)
            add_up_in_fp32(model)
        elif self.settings.reduce != "fp32":
            self.package.utilities.rank_zero_only(warn_user)(
                f"{self!r}: reduce={self.settings.reduce!r} has an effect under FSDP only, and this model is "
                "not sharded: its gradients are reduced in the dtype of the weights; for DDP use "
                "DDPStrategy(ddp_comm_hook=bf16_compress_hook)"
            )

    def current_scale(self) -> Tensor | None:
        """Return the loss scale on its device, float32, 0-dim, without a host sync.

        None before the first loss, and where nothing is scaled.
        """
        return self._scaler.loss_scale.value

    # -- starting and ending ------------------------------------------------------------------

    def _refuse_other_device(self, found: str, remedy: str) -> None:
        """Raise if a device was asked for on which nothing runs: all would silently compute in fp32."""
        given = self.settings.device
        if given is not None and given != found:
            msg = (
                f"{type(self).__name__}({self.settings.precision!r}, device={given!r}) was given, but the "
                f"model runs on {found!r}: autocast and the loss scale of {given!r} do nothing there; delete "
                f"device={given!r} (the plugin finds the model's), or {remedy}"
            )
            raise ValueError(msg)

    def _start(self, device_type: str, **scaler_options: Any) -> None:
        """Make what depends on the device, once it is known."""
        self.device = self.settings.device or device_type
        if self.settings.float8_config is not None:
            refuse_device(repr(self), self.device, self.settings.float8_config)
        rules = self.settings.op_rules or environment_rules(self.device)
        if rules is not None:
            self._rules = rules
            set_default_rules(rules)
        self._scaler.place(self.device, **scaler_options)
        self.step_log.exact = self.settings.exact_schedulers
        self.package.utilities.rank_zero_only(warn_of_slow_fp16)(self.settings.precision, self.device)

    def teardown(self) -> None:
        """End the run: give float32 weights and the rules back; the loss scale stays."""
        self._weights.restore()
        if self._rules is not None:
            set_default_rules(None)
            self._rules = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Put the modules named by ``fp32_modules`` under fp32; in fp8 convert Linear layers; in place."""
        in_fp32 = apply_fp32_modules(module, self.settings.fp32_modules)
        if self.settings.float8_config is None:
            return module
        return convert_linear_layers(module, self.settings.float8_config, left_out=in_fp32)

    def convert_input(self, data: Any) -> Any:
        """Return the batch as it is: autocast casts what each op needs, labels and fp64 stay.

        Where all weights are stored in 16 bits, floating-point tensors become such, as in Lightning.
        """
        if not self._weights.replace_autocast:
            return data
        return apply_to_collection(data, Tensor, partial(_in_dtype, self.settings.training_dtype))

    def convert_output(self, data: Any) -> Any:
        """Return outputs as they are."""
        return data

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Create tensors as usual: weights are fp32."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Create modules as usual: weights are fp32."""
        return nullcontext()

    # -- regions ------------------------------------------------------------------------------

    def autocast_context_manager(self) -> torch.autocast:
        """Return a new autocast region of the training precision; where all weights are stored, none."""
        return self._region(self.settings.precision)

    def _region(self, precision: str) -> torch.autocast:
        dtype = TRAINING_DTYPES[precision]
        if dtype is torch.float32 or self._weights.replace_autocast:
            return self._no_region()
        return autocast(
            self.device,
            dtype=dtype,
            cache_enabled=self.shares_casts,
            rules=self._rules,
        )

    def _no_region(self) -> torch.autocast:
        return autocast(self.device, enabled=False)

    # -- gradients ----------------------------------------------------------------------------

    def grad(self, outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """Return unscaled gradients of ``outputs``; see :func:`amp_plugin.scaling.penalty.grad`."""
        return penalty.grad(outputs, inputs, scaler=self._scaler, **options)

    def gradient_penalty(self, outputs: Any, inputs: Any, **options: Any) -> Tensor:
        """Return a penalty to add to a loss; see :func:`amp_plugin.scaling.penalty.gradient_penalty`."""
        return penalty.gradient_penalty(outputs, inputs, scaler=self._scaler, **options)

    # -- steps --------------------------------------------------------------------------------

    def last_step(self, optimizer: Optimizer) -> StepResult:
        """Return what became of an optimizer's last step, in any precision.

        Without a loss scale both scales are 1. ``norm`` is None if there were no gradients, and with
        ``on_nonfinite="ignore"`` unless AmpMonitor or a clip has measured it.

        Args:
            optimizer: the framework's or torch's.

        Raises:
            RuntimeError: the optimizer has not stepped yet.
        """
        return self._scaler.last_step(self._unwrap(optimizer))

    def step_scheduler(self, scheduler: Any, *args: Any) -> bool:
        """Step a scheduler by hand, unless its optimizer's step was skipped: manual optimization, Fabric.

        Call it after each ``optimizer.step()`` that the scheduler counts. With a fused optimizer on a GPU the
        host learns of a skip one step later, and the scheduler misses that later step instead, unless
        ``exact_schedulers``.

        Args:
            scheduler: any of torch's; others need an attribute ``optimizer``.
            *args: for ``scheduler.step``, such as the metric of ReduceLROnPlateau.

        Returns:
            Whether it was stepped.

        Raises:
            TypeError: the scheduler does not say which optimizer it is for.
            RuntimeError: that optimizer has not stepped yet.
        """
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            msg = (
                f"step_scheduler({type(scheduler).__name__}): it has no attribute 'optimizer'; call "
                "its step() where not plugin.last_step(optimizer).skipped"
            )
            raise TypeError(msg)
        self.last_step(optimizer)  # raises if there is none
        if self.step_log.holds_schedulers(self._unwrap(optimizer)):
            return False
        scheduler.step(*args)
        return True

    @property
    def step_log(self) -> StepLog:
        """The log of the scaler's steps."""
        return self._scaler.step_log

    def _report(self, optimizer: Optimizer, result: StepResult) -> None:
        self._attempted_steps += 1  # only now: a closure may have raised
        for observer in self.observers:
            observer(optimizer, result)

    def _unwrap(self, optimizer: Any) -> Optimizer:
        return optimizer  # type: ignore[no-any-return]

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far, of all optimizers: a host sync."""
        return self._scaler.skipped_steps()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far, of all optimizers, skipped ones not counted: a host sync.

        Goes on counting in a resumed fp16 run; without a loss scale nothing is saved.
        """
        return self._attempted_steps - self.skipped_steps

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, torch's keys among it; empty where nothing is scaled."""
        if not self._scaler.is_enabled():
            return {}
        return {**self._scaler.state_dict(), "optimizer_steps": self.optimizer_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a loss scale: ours, torch's or a stock plugin's; an empty one warns."""
        if not self.settings.scales_loss:
            return
        if not state_dict:
            warn_user(
                f"{self!r}: the checkpoint was not saved in fp16 and holds no loss scale; it stays at "
                f"{self._scaler.get_scale():g}"
            )
            return
        self._scaler.load_state_dict(dict(state_dict))
        self._attempted_steps = state_dict.get("optimizer_steps", 0) + self.skipped_steps


def _in_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
