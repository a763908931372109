"""Refuse the releases of lightning that were uploaded by an attacker."""

from __future__ import annotations

from importlib import metadata

MALICIOUS = ("2.6.2", "2.6.3")


def refuse_malicious_release() -> None:
    """Raise if the installed lightning is 2.6.2 or 2.6.3, without importing it.

    Raises:
        ImportError: one of the two malicious uploads is installed (GHSA-w37p-236h-pfx3).
    """
    try:
        version = metadata.version("lightning")
    except metadata.PackageNotFoundError:
        return
    if version in MALICIOUS:
        msg = (
            f"lightning {version} is installed: {' and '.join(MALICIOUS)} were uploaded by an attacker "
            "(GHSA-w37p-236h-pfx3) and run foreign code when imported; allowed is lightning>=2.6.4. "
            "Uninstall it, replace the secrets this machine holds, then pip install 'lightning>=2.6.4'"
        )
        raise ImportError(msg)
