"""The base class of the plugins for Trainer and Fabric, with their settings, regions and loss scale."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn

from amp_plugin.adapters.option_sources import resolved
from amp_plugin.adapters.session import EntryPoint
from amp_plugin.casting.rules import RULES_VARIABLE
from amp_plugin.messages import warn_user
from amp_plugin.options import LossScaleOptions, PluginOptions, option_defaults, option_names, takes
from amp_plugin.precision import STOCK_NAMES
from amp_plugin.sharding.fully_shard import fsdp1_policy
from amp_plugin.weights.ddp import refuse_sharded, sharded_by

_OWN_PRECISION: Final = {"DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy"}


def has_own_precision(strategy: object) -> bool:
    """Return whether a Lightning strategy, such as DeepSpeedStrategy, handles mixed precision itself."""
    return any(kind.__name__ in _OWN_PRECISION for kind in type(strategy).__mro__)


def _checked_options(owner: str, given: Mapping[str, Any]) -> PluginOptions:
    """Return the checked options of a plugin.

    Environment variables supply options that were not given in code.
    """
    defaults = option_defaults(PluginOptions)  # LightningCLI also passes the defaults
    doubled = [
        name for name in option_names(LossScaleOptions) if given.get(name, defaults[name]) != defaults[name]
    ]
    if doubled and given.get("scaler") is not None:
        listed = ", ".join(f"{name}={given[name]!r}" for name in doubled)
        msg = (
            f"{owner}(scaler=..., {listed}): the scaler has its own {' and '.join(doubled)}, which would "
            f"be used instead; give scaler=amp_plugin.GradScaler({listed}), or leave scaler= out"
        )
        raise TypeError(msg)
    # AMP_PLUGIN_RULES is not read here. A plugin reads this variable once the device is known.
    environment = {name: value for name, value in os.environ.items() if name != RULES_VARIABLE}
    stated = {name: value for name, value in given.items() if name != "scaler"}
    return resolved(PluginOptions, [("argument", stated)], environment, door="Lightning")[0]


class PrecisionCore(EntryPoint):
    """The base class of the precision plugins for Trainer and Fabric."""

    package: Any
    """The framework's module, such as ``lightning.pytorch`` or ``lightning_fabric``."""
    shares_casts = True
    """Whether all uses of a weight in a region share one cast. Their gradients are then summed in 16 bits."""

    @takes(PluginOptions, by_position=1)
    def __init__(self, **given: Any) -> None:
        owner = type(self).__name__
        options = _checked_options(owner, given)
        self._open_session(options, str(options.precision))
        self.precision: Any = STOCK_NAMES[self.session.precision]  # Lightning's own name, e.g. "16-mixed"
        if given.get("scaler") is not None:
            self._replace_scaler(given["scaler"])

    @property
    def _desired_input_dtype(self) -> torch.dtype:
        """The dtype of training, which Lightning's throughput monitor reads."""
        return self.session.training_dtype

    @property
    def settings(self) -> PluginOptions:
        """The options, checked."""
        return cast("PluginOptions", self.session.options)

    def __repr__(self) -> str:
        """Return the class name, the precision and, for weights in 16 bits, the option ``weights``."""
        weights = f", weights={self.settings.weights!r}" if self.settings.weights != "fp32" else ""
        return f"{type(self).__name__}({self.settings.precision!r}{weights})"

    def __format__(self, spec: str) -> str:
        """Return advice for the user. Lightning puts ``f"{plugin}"`` into its errors about plugins."""
        package = self.package.__name__
        other = "The Trainer takes " if "fabric" in package else "Fabric takes Fabric"
        text = (
            f"{self!r} of {package} (which sets the precision: delete precision=... and keep this plugin. "
            f"Where a library passes precision=, leave it and run the program by amp-plugin run. {other}"
            "AmpPrecision. amp_plugin.adapters.lightning.classes_for(package) has plugins for other packages)"
        )
        return format(text, spec)

    @property
    def scaler(self) -> Any:
        """The ``amp_plugin.GradScaler`` of this plugin in fp16, otherwise None.

        Before or between runs, the scaler can be replaced by another ``amp_plugin.GradScaler``, or by an
        object with all of its methods. If a ``torch.amp.GradScaler`` is assigned, a new
        ``amp_plugin.GradScaler`` gets its options and state. If None is assigned, no loss is scaled.

        Raises:
            TypeError: the assigned value has another type, or this precision does not use loss scaling.
        """
        return self.session.shown_scaler

    @scaler.setter
    def scaler(self, given: Any) -> None:
        self._replace_scaler(given)

    def _replace_scaler(self, given: Any) -> None:
        if given is not None and not self.session.scales_loss:
            msg = (
                f"{self!r}.scaler = ...: no loss is scaled in {self.settings.precision}; "
                f"use {type(self).__name__}('fp16'), or leave the scaler out"
            )
            raise TypeError(msg)
        self.session.replace_scaler(given, f"{type(self).__name__}.scaler")

    @property
    def device(self) -> str:
        """The type of the device on which training runs. It is empty until training starts."""
        return self.session.device

    @property
    def mixed_precision_config(self) -> Any:
        """The mixed-precision policy that FSDPStrategy passes to FSDP, unless the user gave another one."""
        return fsdp1_policy(self.session.dtype_plan)

    def _check_shards(self, model: nn.Module) -> None:
        """Check that a sharded model has the planned dtypes.

        Raise an error if the model's weights cannot be stored in 16 bits.
        """
        refuse_sharded(self.settings.weights, sharded_by(model))
        self.session.check_shards(model, warn=self._warn)

    def _warn(self, text: str) -> None:
        """Warn once for all ranks."""
        self.package.utilities.rank_zero_only(warn_user)(text)

    def current_scale(self) -> Tensor | None:
        """Return the loss scale on its device (float32, 0-dim), without a host sync.

        The result is None before the first loss, and in precisions without loss scaling.
        """
        return self._scaler.loss_scale.value

    # -- starting and ending ---------------

    def _refuse_strategy(self, strategy: object) -> None:
        """Raise TypeError if a strategy handles mixed precision itself."""
        if has_own_precision(strategy):
            msg = (
                f"{type(self).__name__} does not work under {type(strategy).__name__}, which does mixed "
                "precision itself without the plugin: delete the plugin and give precision= "
                "('16-mixed', 'bf16-mixed', on XLA 'bf16-true'), or use strategy='fsdp'"
            )
            raise TypeError(msg)

    def _start(self, device_type: str, groups: Mapping[str, Any]) -> None:
        """Begin the run, once the device and the process groups of FSDP are known."""
        is_first_rank = self.package.utilities.rank_zero_only.rank == 0
        self.session.begin(device_type, groups, is_first_rank=is_first_rank)

    def teardown(self) -> None:
        """End the run. Weights are converted back to float32, and earlier op rules are restored.

        The loss scale does not change.
        """
        self.session.end(warn=None)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make ``fp32_modules`` compute in fp32, and convert Linear layers to other formats, in place."""
        return self.session.convert(module)

    def convert_input(self, data: Any) -> Any:
        """Return the batch unchanged, because autocast casts the arguments of each op.

        If all weights are stored in a 16-bit dtype, floating-point inputs are converted to that dtype, as in
        Lightning.
        """
        if not self.session.replaces_autocast:
            return data
        dtype = self.session.training_dtype
        return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def convert_output(self, data: Any) -> Any:
        """Return outputs unchanged."""
        return data

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing, because weights are created in fp32."""
        return nullcontext()

    module_init_context = tensor_init_context

    # -- regions ---------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """Run a forward in the training precision."""
        return self.autocast_context_manager()

    def autocast_context_manager(self) -> torch.autocast:
        """Return a new autocast region, which is disabled if all weights are stored in 16 bits."""
        if not self.device:
            msg = (
                f"{self!r} does not know its device before trainer.fit (in Fabric, fabric.setup with a "
                "FabricAmpPrecision); before that use amp_plugin.autocast(device, dtype)"
            )
            raise RuntimeError(msg)
        return self.session.region(cache_enabled=self.shares_casts)

    # -- steps -----------------------------

    def step_scheduler(self, scheduler: Any, *args: Any) -> bool:
        """Step a scheduler unless its optimizer's step was skipped.

        ``step_scheduler`` is for manual optimization and for Fabric. Call ``step_scheduler`` after each
        ``optimizer.step()`` that the scheduler counts. With a fused optimizer on a GPU, the host learns about
        a skipped step one step late. The scheduler therefore reacts to a skipped step one step late, unless
        ``exact_schedulers`` is on.

        Args:
            scheduler: a scheduler with an attribute ``optimizer``, such as a torch scheduler.
            *args: arguments to pass to ``scheduler.step``, such as the metric for ReduceLROnPlateau.

        Returns:
            True if the scheduler was stepped.

        Raises:
            RuntimeError: the scheduler's optimizer has not stepped yet.
        """
        return self.session.step_scheduler(scheduler, *args)

    @property
    def skipped_steps(self) -> int:
        """The total number of skipped steps so far, summed over all optimizers. Reading it is a host sync."""
        return self._scaler.skipped_steps()

    @property
    def optimizer_steps(self) -> int:
        """The total number of steps taken so far, summed over all optimizers. Reading it is a host sync.

        Skipped steps do not count. A resumed fp16 run continues the count. If no loss is scaled, the
        step count is not saved in checkpoints.
        """
        return self.session.attempted_steps - self.skipped_steps

    # -- checkpoints -----------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, with the keys of torch's GradScaler.

        The state is empty if no loss is scaled.
        """
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a loss scale's state, as saved by amp_plugin, torch or Lightning. Warn if it is not used."""
        if told := self.session.load_state_dict(state_dict):
            self._warn(f"{self!r}: {told}")
