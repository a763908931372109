"""Bind op rules to the autocast blocks of a program that does not know this package.

``amp-plugin run --rules rules.yaml train.py`` binds them for the length of a run. ``AMP_PLUGIN_RULES`` binds
them in every process that imports torch: torch loads this module by its entry point ``torch.backends``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

    from amp_plugin.casting.rules import OpRules

_LAUNCHERS = {
    *("torchrun", "accelerate", "amp-plugin", "deepspeed"),
    *("torch.distributed.run", "torch.distributed.launch"),
}


class BoundRules:
    """Op rules that ``torch.autocast`` follows while the region is open; a warning if no block has.

    Args:
        rules: of their device.
        name: of the file, for the warning.
    """

    def __init__(self, rules: OpRules, name: str) -> None:
        self._rules, self._name = rules, name
        self._is_read = False
        self._give_back: Any = None

    def __enter__(self) -> Self:
        """Let autocast follow the rules, and look which blocks are opened."""
        import torch  # noqa: PLC0415 - this module is loaded while torch is

        from amp_plugin.casting.dispatcher import set_default_rules  # noqa: PLC0415

        set_default_rules(self._rules)
        entered = torch.autocast.__enter__

        def enter(block: Any) -> Any:
            is_ours = block.device == self._rules.device_type and bool(block._enabled)
            self._is_read = self._is_read or is_ours
            return entered(block)  # type: ignore[no-untyped-call]

        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        self._give_back = entered
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Give torch its own rules back."""
        import torch  # noqa: PLC0415

        from amp_plugin.casting.dispatcher import set_default_rules  # noqa: PLC0415

        torch.autocast.__enter__ = self._give_back  # type: ignore[method-assign]
        set_default_rules(None)
        self.warn_if_unread()

    def warn_if_unread(self) -> None:
        """Print a warning if no autocast block has followed the rules."""
        if not self._is_read:
            device = self._rules.device_type
            print(
                f"amp_plugin: no autocast block on {device} was opened, so nothing has read the rules of "
                f"{self._name}; open torch.autocast({device!r}), or leave the file out",
                file=sys.stderr,
            )


def bind_environment() -> None:
    """Bind the rules that ``AMP_PLUGIN_RULES`` names, for the whole process; ``import torch`` calls it.

    Raises:
        ValueError: there is no such file, or it holds no rules.
    """
    path = os.environ.get("AMP_PLUGIN_RULES", "")
    if not path or _is_launcher():
        return
    import atexit  # noqa: PLC0415 - most processes stop above

    from amp_plugin.casting.rules import read_environment_rules  # noqa: PLC0415

    bound = BoundRules(read_environment_rules(path), path).__enter__()
    if _is_main_process():
        atexit.register(bound.warn_if_unread)


def _is_launcher() -> bool:
    """Return whether this process only starts others, or is a command that binds rules itself."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    names = {Path(sys.argv[0] if sys.argv else "").name, getattr(main, "name", "")}
    return bool(names & _LAUNCHERS)


def _is_main_process() -> bool:
    import multiprocessing  # noqa: PLC0415

    return multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
