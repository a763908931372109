"""The installed torch's version, where something depends on it."""

from __future__ import annotations

import torch


def torch_older_than(release: str) -> bool:
    """Say whether the installed torch is older than a release.

    Args:
        release: ``"2.12"``, for example; a pre-release of it is not older.
    """
    major, minor = map(int, release.split("."))
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)
