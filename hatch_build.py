"""Put the native cores of the folder that AMP_PLUGIN_BUNDLE names into the wheel; `make wheels` does.

An editable installation gets its own copy of amp_plugin_autoload.py. `import torch` loads this file in every
program, so it must still be there after the checkout was moved or deleted.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundleHook(BuildHookInterface):  # type: ignore[type-arg]
    """Make the wheel one for this Python and platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the cores and the tag if a bundle is named, and the autoload file to an editable wheel."""
        if version == "editable":
            file = "amp_plugin_autoload.py"
            build_data["force_include_editable"][str(Path(self.root, file))] = file
        if folder := os.environ.get("AMP_PLUGIN_BUNDLE"):
            build_data["pure_python"] = False
            build_data["tag"] = wheel_tag(Path(folder))
            build_data["force_include"][folder] = "amp_plugin/kernels/prebuilt"


def wheel_tag(folder: Path) -> str:
    """Return the tag that says what the shared objects in ``folder`` need: Python and the C library."""
    versions = {
        int(minor)
        for file in folder.rglob("*.so")
        for minor in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())
    }
    if not versions:
        msg = f"there is no native core in {folder}; run `make wheels`, which compiles them there"
        raise FileNotFoundError(msg)
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return f"{python}-{python}-manylinux_2_{max(versions)}_x86_64"
