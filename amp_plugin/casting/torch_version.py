"""The installed torch's version, where something depends on it."""

from __future__ import annotations

import torch

from amp_plugin.casting.rule_tables import is_older


def torch_release() -> str:
    """Return the release of the installed torch, ``"2.13"`` for example."""
    return ".".join(torch.__version__.split(".")[:2])


def torch_older_than(release: str) -> bool:
    """Say whether the installed torch is older than a release.

    Args:
        release: ``"2.12"``, for example; a pre-release of it is not older.
    """
    return is_older(torch_release(), release)
