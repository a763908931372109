"""The environment variables that this package reads, and misspelt ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from amp_plugin.did_you_mean import did_you_mean
from amp_plugin.options import AccelerateOptions, option_names

PREFIX: Final = "AMP_PLUGIN_"
OWN: Final = (
    "AMP_PLUGIN_NATIVE",
    "AMP_PLUGIN_CACHE_DIR",
    "AMP_PLUGIN_SEPARATE_SOURCES",
    "AMP_PLUGIN_CONFIG",
)
OF_OTHERS: Final = ("XDG_CACHE_HOME", "CXX", "MAX_JOBS")
KNOWN: Final = (*OWN, *(PREFIX + option.upper() for option in option_names(AccelerateOptions)))


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of the package's variables, misspelt ones included.

    Args:
        environment: usually ``os.environ``.
    """
    return {
        name: value for name, value in environment.items() if name.startswith(PREFIX) or name in OF_OTHERS
    }


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables ``AMP_PLUGIN_...`` that nothing reads.

    Args:
        environment: usually ``os.environ``.

    Returns:
        Name -> ``"; did you mean X?"``, or ``""`` if no known variable is near.
    """
    endings = [name.removeprefix(PREFIX) for name in KNOWN]  # the prefix makes all names look alike
    return {
        name: did_you_mean(name.removeprefix(PREFIX), endings, written=PREFIX.__add__)
        for name in environment
        if name.startswith(PREFIX) and name not in KNOWN
    }
