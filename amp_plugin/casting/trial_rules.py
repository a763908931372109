"""Try rules out: for the length of a block every region without rules of its own follows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_plugin.casting.autocast_kernels import DEFAULT, KERNELS, NO_RULES
from amp_plugin.casting.environment_rules import VARIABLE
from amp_plugin.casting.rules import OpRules
from amp_plugin.kernels.build import require_native


@contextmanager
def rules_on_trial(rules: OpRules) -> Iterator[None]:
    """Let regions without rules of their own, and torch's blocks, follow rules while the block runs.

    Any number of rule sets can be tried: none of them takes one of the process's numbers. Compiled functions
    run eagerly meanwhile.

    Args:
        rules: of their device; other devices keep theirs.

    Raises:
        RuntimeError: there is no native core.
        ValueError: ``AMP_PLUGIN_RULES`` is set, whose rules regions would follow instead.
    """
    require_native("a trial of rules")
    if os.environ.get(VARIABLE):
        msg = f"{VARIABLE}={os.environ[VARIABLE]} decides which rules regions follow; unset it to try others"
        raise ValueError(msg)
    KERNELS.install()
    device_type = rules.device_type
    with torch.compiler.set_stance("force_eager"):
        KERNELS.put_default(rules)
        KERNELS.follow_by_default(device_type, DEFAULT)
        try:
            yield
        finally:
            KERNELS.put_default(OpRules.default(device_type))
            KERNELS.follow_by_default(device_type, NO_RULES)
