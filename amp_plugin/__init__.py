"""Automatic mixed precision for PyTorch, Lightning and Accelerate.

Public names are imported lazily, when they are first used. As a result, ``import amp_plugin`` compiles
nothing, imports no framework and does not touch a GPU. Names that need a framework are in ``__all__`` only if
that framework is installed.

Example:
    >>> import amp_plugin
    >>> amp_plugin.is_autocast_available("cpu")
    True
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_plugin.adapters.accelerate import AmpAccelerator as AmpAccelerator
    from amp_plugin.adapters.accelerate import AmpKwargs as AmpKwargs
    from amp_plugin.adapters.lightning import AmpMonitor as AmpMonitor
    from amp_plugin.adapters.lightning import AmpPrecision as AmpPrecision
    from amp_plugin.adapters.lightning import FabricAmpPrecision as FabricAmpPrecision
    from amp_plugin.casting.cast_log import log_casts as log_casts
    from amp_plugin.casting.custom_function import custom_bwd as custom_bwd
    from amp_plugin.casting.custom_function import custom_fwd as custom_fwd
    from amp_plugin.casting.region import autocast as autocast
    from amp_plugin.casting.region import is_autocast_available as is_autocast_available
    from amp_plugin.casting.rules import OpRule as OpRule
    from amp_plugin.casting.rules import OpRules as OpRules
    from amp_plugin.casting.rules_in_force import set_default_rules as set_default_rules
    from amp_plugin.casting.run_in import run_in as run_in
    from amp_plugin.casting.threads import autocast_module as autocast_module
    from amp_plugin.formats.layers import convert as convert
    from amp_plugin.hardware import choose_precision as choose_precision
    from amp_plugin.messages import OptionError as OptionError
    from amp_plugin.numerics.diagnose import diagnose as diagnose
    from amp_plugin.numerics.formats import log_formats as log_formats
    from amp_plugin.numerics.shadow import shadow_run as shadow_run
    from amp_plugin.options import Spike as Spike
    from amp_plugin.run_page.report import report as report
    from amp_plugin.scaling.grad_scaler import GradScaler as GradScaler
    from amp_plugin.scaling.spikes import SpikeError as SpikeError
    from amp_plugin.scaling.step_records import StepRecord as StepRecord
    from amp_plugin.scaling.step_records import read_records as read_records
    from amp_plugin.sharding.fully_shard import fully_shard as fully_shard
    from amp_plugin.sharding.plan import DtypePlan as DtypePlan
    from amp_plugin.sharding.report import dtype_report as dtype_report
    from amp_plugin.sharding.report import log_collectives as log_collectives
    from amp_plugin.testing.assertions import assert_same_numerics as assert_same_numerics
    from amp_plugin.testing.assertions import assert_trains_like as assert_trains_like
    from amp_plugin.tuning.gap import Gap as Gap
    from amp_plugin.tuning.rehearsal import rehearse as rehearse
    from amp_plugin.tuning.rollouts import Rollout as Rollout
    from amp_plugin.tuning.tune import tune as tune
    from amp_plugin.weights.store import restore_weights as restore_weights
    from amp_plugin.weights.store import store_weights as store_weights

# A release commit removes ".dev0", and the next commit sets the next version with ".dev0".
__version__ = "0.4.0"

_NAMES = {  # maps modules to their public names
    "casting.cast_log": ("log_casts",),
    "casting.custom_function": ("custom_bwd", "custom_fwd"),
    "casting.rules_in_force": ("set_default_rules",),
    "casting.region": ("autocast", "is_autocast_available"),
    "casting.rules": ("OpRule", "OpRules"),
    "casting.run_in": ("run_in",),
    "casting.threads": ("autocast_module",),
    "formats.layers": ("convert",),
    "gradient_hooks": ("unscaled_hooks",),
    "hardware": ("choose_precision",),
    "messages": ("OptionError",),
    "numerics.diagnose": ("diagnose",),
    "numerics.formats": ("log_formats",),
    "numerics.shadow": ("shadow_run",),
    "options": ("Spike",),
    "run_page.report": ("report",),
    "scaling.grad_scaler": ("GradScaler",),
    "scaling.spikes": ("SpikeError",),
    "scaling.step_records": ("StepRecord", "read_records"),
    "sharding.fully_shard": ("fully_shard",),
    "sharding.plan": ("DtypePlan",),
    "sharding.report": ("dtype_report", "log_collectives"),
    "testing.assertions": ("assert_same_numerics", "assert_trains_like"),
    "tuning.gap": ("Gap",),
    "tuning.rehearsal": ("rehearse",),
    "tuning.rollouts": ("Rollout",),
    "tuning.tune": ("tune",),
    "weights.store": ("restore_weights", "store_weights"),
}
_HOME = {name: f"amp_plugin.{module}" for module, names in _NAMES.items() for name in names}
_ADAPTERS = {
    "AmpAccelerator": "accelerate",
    "AmpKwargs": "accelerate",
    "AmpMonitor": "lightning",
    "AmpPrecision": "lightning",
    "FabricAmpPrecision": "lightning",
}
_REQUIREMENTS = {"accelerate": "accelerate>=1.15", "lightning": "lightning>=2.6.4"}
_PACKAGES_OF = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "pytorch_lightning", "lightning_fabric"],
}

_INSTALLED = [
    name
    for name, framework in _ADAPTERS.items()
    if any(importlib.util.find_spec(package) for package in _PACKAGES_OF[framework])
]

__all__ = ["__version__", *sorted([*_HOME, *_INSTALLED])]  # noqa: PLE0604 - names, computed


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name in _ADAPTERS:
        # The result is not stored in globals(), because it depends on the Lightning package in use.
        return _from_adapter(name)
    if name not in _HOME:
        from amp_plugin.messages import did_you_mean  # noqa: PLC0415 - lazy imports
        from amp_plugin.removed import reason  # noqa: PLC0415

        if removed := reason(f"amp_plugin.{name}"):
            raise AttributeError(removed)
        known = __dir__()
        hint = did_you_mean(name, known)
        msg = f"module 'amp_plugin' has no attribute {name!r}; it has {', '.join(known)}{hint}"
        raise AttributeError(msg)
    from amp_plugin.patches import random_numbers_kept  # noqa: PLC0415

    with random_numbers_kept():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _from_adapter(name: str) -> Any:
    """Import a public name of a framework's adapter."""
    framework = _ADAPTERS[name]
    try:
        return getattr(importlib.import_module(f"amp_plugin.adapters.{framework}"), name)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES_OF[framework]:
            raise
        msg = (
            f"amp_plugin.{name} is for {framework.capitalize()}, which is not installed; "
            f"run: pip install '{_REQUIREMENTS[framework]}'"
        )
        raise ImportError(msg) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *_ADAPTERS})
