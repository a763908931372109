"""The options of the plugins: what the program gives, and what the environment sets where it gives none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from amp_plugin.adapters.float8 import checked_config
from amp_plugin.adapters.option_sources import decided, naming, outside_program, read_all
from amp_plugin.adapters.settings import AdapterSettings
from amp_plugin.casting.rules import RULES_VARIABLE
from amp_plugin.messages import warn_user
from amp_plugin.options import LightningOptions, ScalingOptions, option_defaults, option_names
from amp_plugin.precision import checked_training_precision, weights_meant


def _refuse_options_of_scaler(owner: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError if options are given that a scaler given with them has of its own."""
    defaults = option_defaults(LightningOptions)  # LightningCLI gives them too
    doubled = [
        name for name in option_names(ScalingOptions) if given.get(name, defaults[name]) != defaults[name]
    ]
    if doubled and given.get("scaler") is not None:
        listed = ", ".join(f"{name}={given[name]!r}" for name in doubled)
        msg = (
            f"{owner}(scaler=..., {listed}): the scaler has its own {' and '.join(doubled)}, which "
            f"would win; give amp_plugin.GradScaler({listed}) as scaler=, or leave scaler= out"
        )
        raise TypeError(msg)


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(AdapterSettings, LightningOptions):
    """The options of AmpPrecision and FabricAmpPrecision, checked, in our own names."""

    @classmethod
    def from_arguments(cls, owner: str, given: Mapping[str, Any]) -> Self:
        """Check the arguments of a plugin, ``owner``; the environment sets what they leave out."""
        _refuse_options_of_scaler(owner, given)
        outside, sources = decided(outside_program(os.environ))
        if sources.get("rules") == RULES_VARIABLE:
            del outside["rules"]  # a plugin reads them where it learns its device
        names = option_names(LightningOptions)
        for other in sorted(outside.keys() - {*names}):
            warn_user(f"{other} from {sources[other]} has no effect in Lightning, it is Accelerate's option")
        with naming({name: source for name, source in sources.items() if name not in given}):
            known = {name: value for name, value in read_all(outside).items() if name in names}
            stated = {**option_defaults(LightningOptions), **known, **given, "scaler": None}
            name, config = stated["precision"], stated["float8_config"]
            stated["precision"] = precision = checked_training_precision(name)
            stated["weights"] = weights_meant(name, stated["weights"])
            stated["float8_config"] = (
                checked_config(f"{owner}('fp8')", config) if precision == "fp8" else None
            )
            return cls(**stated)

    @property
    def scales_loss(self) -> bool:
        """Whether training needs a loss scale: fp16 only."""
        return self.precision == "fp16"
