"""The rules file that the variable AMP_PLUGIN_RULES names, for the whole process."""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from amp_plugin.casting.rules import OpRules
from amp_plugin.user_warnings import warn_user

VARIABLE: Final = "AMP_PLUGIN_RULES"


def environment_rules(device_type: str) -> OpRules | None:
    """Return the rules of a device that the environment names; None for the default ones.

    Warns where they are for another device.

    Args:
        device_type: the device of a region.

    Raises:
        ValueError: there is no such file, or it holds no rules; the text names the variable.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        return None
    rules = _read(path)
    if rules.device_type == device_type:
        return rules
    warn_user(
        f"{VARIABLE}={path}: the rules are for {rules.device_type}; a region on {device_type} follows the "
        f"default ones. For the same policy there, write device_type: {device_type} into a copy of the file"
    )
    return None


@cache
def _read(path: str) -> OpRules:
    try:
        return OpRules.from_yaml(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        msg = f"{VARIABLE}={path}: {what}; give the path of a YAML file of rules, or unset the variable"
        raise ValueError(msg) from error
