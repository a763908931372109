"""Each test begins with torch's own kernels under ``torch.autocast``."""

from __future__ import annotations

import pytest

from amp_plugin import set_default_rules
from amp_plugin.casting.dispatcher import KERNELS, NO_RULES
from amp_plugin.casting.rules import TABLES


@pytest.fixture(autouse=True)
def blocks_are_torchs() -> None:
    """Give torch its kernels back: an Accelerator that no test has ended has `torch.autocast` run on ours."""
    if any(KERNELS.followed[device] != NO_RULES for device in TABLES):
        set_default_rules(None)
