"""Add compiled native cores to the wheel if AMP_PLUGIN_BUNDLE names their folder.

`make wheels` sets this variable. An editable installation gets its own copy of amp_plugin_autoload.py.
`import torch` loads this copy in every program, and still works if the checkout has been moved or deleted.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundleHook(BuildHookInterface):  # type: ignore[type-arg]
    """Tag a wheel with this Python version and platform if it contains native cores."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the autoload file to an editable wheel, and any native cores to a wheel with a platform tag."""
        if version == "editable":
            file = "amp_plugin_autoload.py"
            build_data["force_include_editable"][str(Path(self.root, file))] = file
        if folder := os.environ.get("AMP_PLUGIN_BUNDLE"):
            build_data["pure_python"] = False
            build_data["tag"] = wheel_tag(Path(folder))
            build_data["force_include"][folder] = "amp_plugin/kernels/prebuilt"


def wheel_tag(folder: Path) -> str:
    """Return the wheel tag for the Python and glibc versions that the ``*.so`` files in ``folder`` need."""
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
