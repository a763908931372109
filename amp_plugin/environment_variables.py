"""The variables of the environment that this package reads, and those that it takes for misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

PREFIX: Final = "AMP_PLUGIN_"
OWN: Final = ("AMP_PLUGIN_NATIVE", "AMP_PLUGIN_CACHE_DIR", "AMP_PLUGIN_CONFIG")
OF_OTHERS: Final = ("XDG_CACHE_HOME", "CXX", "MAX_JOBS")
ACCELERATE_OPTIONS: Final = (  # AMP_PLUGIN_INIT_SCALE and so on; listed here to be known without Accelerate
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_scale",
    "hysteresis",
    "hysteresis_mode",
    "on_min_scale",
    "dynamic",
    "fp16_gradients",
    "sync_free",
    "rules",
    "fp32_outputs",
    "cast_cache",
    "exact_schedulers",
)


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of the variables that this package reads or takes for its own.

    Args:
        environment: usually ``os.environ``.
    """
    return {
        name: value for name, value in environment.items() if name.startswith(PREFIX) or name in OF_OTHERS
    }


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> what to do for each variable ``AMP_PLUGIN_...`` that nothing reads.

    Args:
        environment: usually ``os.environ``.
    """
    known = [*OWN, *(PREFIX + option.upper() for option in ACCELERATE_OPTIONS)]
    advice = {}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else f"unset it; known are {', '.join(known)}"
            advice[name] = f"nothing reads this variable; {hint}"
    return advice
