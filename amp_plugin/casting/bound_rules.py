"""What torch's autocast blocks do in a program that does not know this package: their rules and their dtype.

``amp-plugin run`` binds them for the length of a run. ``AMP_PLUGIN_RULES`` binds rules in every process that
imports torch: torch loads this module by its entry point ``torch.backends``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from amp_plugin.casting.rules import OpRules

_LAUNCHERS = {
    *("torchrun", "accelerate", "amp-plugin", "deepspeed"),
    *("torch.distributed.run", "torch.distributed.launch", "amp_plugin.__main__"),
    "amp_plugin.adapters.accelerate.__main__",
}


class BoundAutocast:
    """Op rules and a dtype that ``torch.autocast`` follows while the region is open; counts its blocks.

    Args:
        rules: of their device.
        name: of the file, for the warning if no block has followed it.
        dtype: of blocks that name none.

    Attributes:
        blocks: device type and dtype -> number of blocks that were opened and on.
        off: device types of blocks that were opened and off: ``enabled=False``, or no such device is here.
    """

    def __init__(
        self, rules: OpRules | None = None, name: str = "", *, dtype: torch.dtype | None = None
    ) -> None:
        self._rules, self._name, self._dtype = rules, name, dtype
        self.blocks: Counter[tuple[str, torch.dtype]] = Counter()
        self.off: set[str] = set()
        self._is_read = False
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Let autocast follow the rules and the dtype, and count which blocks are opened."""
        import torch  # noqa: PLC0415 - this module is loaded while torch is

        from amp_plugin.casting.dispatcher import process_follows  # noqa: PLC0415

        if self._rules is not None:
            self._undo.enter_context(process_follows(self._rules))
        entered = torch.autocast.__enter__

        def enter(block: Any) -> Any:
            if block._enabled:
                self.blocks[block.device, block.fast_dtype] += 1
            else:
                self.off.add(block.device)
            return entered(block)  # type: ignore[no-untyped-call]

        self._undo.enter_context(replaced(torch.autocast, "__enter__", enter))
        if self._dtype is not None:
            self._undo.enter_context(_dtype_left_open(self._dtype))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Give torch its own rules and dtypes back."""
        self._undo.close()
        self.warn_if_unread()

    def mark_read(self) -> None:
        """Record that regions of ours follow the rules, which are not counted."""
        self._is_read = True

    def warn_if_unread(self) -> None:
        """Print a warning if no autocast block has followed the rules."""
        if self._rules is None or self._is_read:
            return
        if any(device == self._rules.device_type for device, _ in self.blocks):
            return
        device = self._rules.device_type
        print(
            f"amp_plugin: no autocast block on {device} was opened, so nothing has read the rules of "
            f"{self._name}; open torch.autocast({device!r}), or leave the file out",
            file=sys.stderr,
        )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a class, module or function, and put back what was there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _dtype_left_open(dtype: torch.dtype) -> Iterator[None]:
    """Give blocks that name no dtype this one, in every thread: torch's own setting is one thread's.

    Compile caches on disk are tagged with it: a graph holds a block as it was written, without a dtype.
    """
    import inspect  # noqa: PLC0415 - a program's start is short

    import torch  # noqa: PLC0415
    from torch.compiler import config  # noqa: PLC0415

    with ExitStack() as undo:
        for kind in (
            torch.cuda.amp.autocast,
            torch.cpu.amp.autocast_mode.autocast,
        ):  # defaults of their arguments
            for function in {inspect.unwrap(kind.__init__), inspect.unwrap(kind.__new__)}:
                if dtype_names := getattr(function, "__defaults__", None):
                    chosen = tuple(dtype if isinstance(d, torch.dtype) else d for d in dtype_names)
                    undo.enter_context(replaced(function, "__defaults__", chosen))
        made = torch.autocast.__init__

        def make(block: Any, device_type: str, dtype_given: Any = None, *args: Any, **kwargs: Any) -> None:
            made(block, device_type, kwargs.pop("dtype", dtype_given) or dtype, *args, **kwargs)

        make.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
        undo.enter_context(replaced(torch.autocast, "__init__", make))
        others, tag = config.cache_key_tag.split("|"), f"amp_plugin autocast {dtype}"
        config.cache_key_tag = "|".join(part for part in (*others, tag) if part)
        try:
            yield
        finally:
            others = config.cache_key_tag.split("|")  # rules may have been tagged meanwhile
            config.cache_key_tag = "|".join(part for part in others if part != tag)


@contextmanager
def ours_by_default() -> Iterator[None]:
    """Let torch's autocast blocks follow the environment's rules or the default ones, on our kernels."""
    import torch  # noqa: PLC0415 - takes seconds

    from amp_plugin.casting.dispatcher import process_follows  # noqa: PLC0415
    from amp_plugin.casting.rules import OpRules, environment_rules  # noqa: PLC0415
    from amp_plugin.casting.rules_files import TABLES  # noqa: PLC0415

    with ExitStack() as undo:
        for device_type in filter(torch.amp.is_autocast_available, TABLES):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rules are for another device
                rules = environment_rules(device_type)
            undo.enter_context(process_follows(rules or OpRules.default(device_type)))
        yield


def bind_environment() -> None:
    """Bind the rules that ``AMP_PLUGIN_RULES`` names, for the whole process; ``import torch`` calls it.

    Raises:
        ValueError: there is no such file, or it holds no rules.
    """
    path = os.environ.get("AMP_PLUGIN_RULES", "")
    if not path or is_launcher():
        return
    import atexit  # noqa: PLC0415 - most processes stop above

    from amp_plugin.casting.rules import read_environment_rules  # noqa: PLC0415

    bound = BoundAutocast(read_environment_rules(path), path).__enter__()
    if is_main_process():
        atexit.register(bound.warn_if_unread)


def is_launcher() -> bool:
    """Return whether this process only starts others, or is a command that binds by itself."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    names = {Path(sys.argv[0] if sys.argv else "").name, getattr(main, "name", "")}
    return bool(names & _LAUNCHERS)


def is_main_process() -> bool:
    """Return whether this is neither a child of multiprocessing nor another rank than 0."""
    import multiprocessing  # noqa: PLC0415

    return multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
