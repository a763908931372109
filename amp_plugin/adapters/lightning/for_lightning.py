"""AmpPrecision and its companions for ``lightning.pytorch`` and ``lightning.fabric``."""

from __future__ import annotations

from typing import Any, ClassVar

from amp_plugin.adapters.lightning.trusted_release import refuse_malicious_release

refuse_malicious_release()

from lightning import fabric, pytorch  # noqa: E402 - after the check
from lightning.fabric.plugins import FSDPPrecision as FabricFSDPPrecision  # noqa: E402
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision  # noqa: E402
from lightning.pytorch.utilities.types import LRSchedulerConfig  # noqa: E402

from amp_plugin.adapters.lightning.fabric_precision import FabricPrecision, report_set_up  # noqa: E402
from amp_plugin.adapters.lightning.monitor import Monitor  # noqa: E402
from amp_plugin.adapters.lightning.scheduler_holds import HeldBack  # noqa: E402
from amp_plugin.adapters.lightning.trainer_precision import TrainerPrecision  # noqa: E402
from amp_plugin.scaling.penalty import surround_backward  # noqa: E402


class _HeldBackConfig(HeldBack, LRSchedulerConfig):
    pass


class AmpPrecision(TrainerPrecision, MixedPrecision, FSDPPrecision):  # type: ignore[misc]
    __doc__ = TrainerPrecision.__doc__
    package: ClassVar[Any] = pytorch
    config_class = _HeldBackConfig


class FabricAmpPrecision(FabricPrecision, FabricMixedPrecision, FabricFSDPPrecision):
    __doc__ = FabricPrecision.__doc__
    package: ClassVar[Any] = fabric


class AmpMonitor(Monitor, pytorch.Callback):
    __doc__ = Monitor.__doc__
    package: ClassVar[Any] = pytorch


surround_backward(FabricAmpPrecision.backward_allowed)
report_set_up(fabric.wrappers._FabricOptimizer, FabricPrecision.add_optimizer)
report_set_up(fabric.wrappers._FabricModule, FabricPrecision.note_wrapped)
