"""AmpPrecision and its companions for ``lightning.pytorch`` and ``lightning.fabric``."""

from __future__ import annotations

from typing import Any, ClassVar

from amp_plugin.adapters.lightning.trusted_release import refuse_malicious_release

refuse_malicious_release()

from lightning.fabric import wrappers  # noqa: E402
from lightning.fabric.plugins.precision import FSDPPrecision as FabricFSDPPrecision  # noqa: E402
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.fabric.plugins.precision import Precision as PlainFabricPrecision  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402 - after the check
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision, Precision  # noqa: E402
from lightning.pytorch.utilities import rank_zero_warn  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.types import LRSchedulerConfig  # noqa: E402

from amp_plugin.adapters.lightning.fabric_precision import FabricPrecision  # noqa: E402
from amp_plugin.adapters.lightning.monitor import Monitor  # noqa: E402
from amp_plugin.adapters.lightning.scheduler_holds import HeldBack  # noqa: E402
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision  # noqa: E402


class _HeldBackConfig(HeldBack, LRSchedulerConfig):
    pass


class AmpPrecision(TrainerPrecision, MixedPrecision, FSDPPrecision):  # type: ignore[misc]
    """Mixed precision for ``lightning.pytorch.Trainer(plugins=[...])``, under any of its strategies.

    Args:
        precision: ``"fp16"`` (with a loss scale, on CPU too), ``"bf16"`` or ``"fp32"``.
        device: device type, an error where training runs on another; None: the one it runs on.
        eval_precision: precision of validation, test and prediction; None: ``precision``.
        rules: op rules other than the default ones, or a YAML file of them, for the whole run.
        fp32_modules: module names (``"encoder.norm"``, ``"blocks.*.norm"``) or class names
            (``"LayerNorm"``) that compute in fp32.
        cast_cache: keep cast weights over an accumulation window, for 2 bytes an element; None:
            where a window has several micro-batches and the native core is loaded.
        exact_schedulers: wait for the device after each step, so that no scheduler is ever ahead.
        init_scale: first loss scale. This and the options that follow have an effect in fp16 only.
        growth_factor: factor of the scale after ``growth_interval`` steps without overflow.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: optimizer steps without overflow before the scale grows.
        min_scale: floor of the scale; None: 1, or ``init_scale`` if that is lower.
        max_scale: ceiling of the scale; None: float32's largest number.
        hysteresis: overflows tolerated before the scale backs off, the last included.
        hysteresis_mode: when that tolerance is restored: ``"apex"``, ``"megatron"``, ``"deepspeed"``.
        on_min_scale: at the floor, ``"hold"`` the scale or ``"raise"`` FloatingPointError.
        dynamic: False keeps the scale constant; steps that overflow are skipped all the same.
        fp16_gradients: True allows parameters in float16, whose gradients lose what is below 6e-8.

    Raises:
        ValueError: an argument is not one of the allowed values; or, when training starts, the Trainer's
            device is not the one given.
        TypeError: an argument is unknown or of another type; or, when training starts, the strategy has a
            precision of its own (DeepSpeed, XLA).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AmpPrecision("fp16")], accelerator="cpu", logger=False)
        >>> trainer.precision
        '16-mixed'
    """

    plain = Precision
    config_class = _HeldBackConfig
    wrapper = LightningOptimizer
    is_overridden = staticmethod(is_overridden)
    warn = staticmethod(rank_zero_warn)


class FabricAmpPrecision(FabricPrecision, FabricMixedPrecision, FabricFSDPPrecision):  # type: ignore[misc]
    """Mixed precision for ``lightning.fabric.Fabric(plugins=[...])``, under any of its strategies.

    Takes the arguments of AmpPrecision. Inputs keep their dtypes, half-precision outputs come back
    as fp32. ``fabric.save(path, {..., "precision": plugin})`` keeps the loss scale.

    Raises:
        ValueError: an argument is not one of the allowed values.
        TypeError: at the first backward, under DeepSpeed.

    Example:
        >>> import torch
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(plugins=[FabricAmpPrecision("bf16")], accelerator="cpu")
        >>> model = fabric.setup(torch.nn.Linear(2, 1))
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """

    plain = PlainFabricPrecision
    wrapper = wrappers._FabricOptimizer
    guard: ClassVar[Any] = wrappers


class AmpMonitor(Monitor, Callback):
    """Log the loss scale, the skipped steps and the gradient norm; stop a run that only skips.

    The progress bar and any logger get ``loss_scale``, ``skipped_steps`` and ``grad_norm``, the norm of
    the unscaled gradients before clipping. In bf16 and fp32, where nothing is scaled or skipped, they
    get ``grad_norm`` alone; it costs one more read of the gradients at each optimizer step there.
    On a GPU the device is read every few steps only, so warning and error come that much later.

    Args:
        max_skips_in_a_row: skipped optimizer steps in a row after which training stops.
        every_n_steps: optimizer steps between two reads of the device; None: each step on CPU,
            else the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: an argument is below 1.
        TypeError: when training starts, if the Trainer has no AmpPrecision.
        RuntimeError: while training, after ``max_skips_in_a_row`` skips; it names the parameters.

    Example:
        >>> AmpMonitor(max_skips_in_a_row=10).max_skips_in_a_row
        10
    """

    warn = staticmethod(rank_zero_warn)
