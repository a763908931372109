"""Applies op rules and a dtype to ``torch.autocast`` blocks in programs that do not use amp_plugin.

``amp-plugin run`` applies rules and a dtype during one run of a program. ``AMP_PLUGIN_RULES`` applies rules
in each process that imports torch (see ``amp_plugin_autoload``).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_plugin.messages import OptionError
from amp_plugin.patches import replaced

if TYPE_CHECKING:
    import torch

    from amp_plugin.casting.rules import OpRules
    from amp_plugin.casting.rules_in_force import Pushed

_LAUNCHERS = {
    *("torchrun", "accelerate", "amp-plugin", "deepspeed"),
    *("torch.distributed.run", "torch.distributed.launch", "amp_plugin.__main__"),
}


@contextmanager
def bound_autocast(
    rules: OpRules | None = None,
    name: str = "",
    *,
    dtype: torch.dtype | None = None,
    on_first: Callable[[str, torch.dtype], object] | None = None,
    on_default: Callable[[], object] = lambda: None,
) -> Iterator[Counter[tuple[str, torch.dtype]]]:
    """Make ``torch.autocast`` follow ``rules``, and use ``dtype`` in blocks without a dtype.

    The context yields a Counter of enabled blocks by device type and dtype. ``on_first`` is called for the
    first block with each pair of device type and dtype. ``on_default`` is called when the program creates an
    enabled block without a dtype, which then uses ``dtype``. ``name`` is the name of the rules file. If no
    autocast block or region has read the rules when the context ends, the main process prints a warning.
    """
    import torch  # noqa: PLC0415 - torch may be loading this module

    from amp_plugin.casting.rules import warn_of_device  # noqa: PLC0415
    from amp_plugin.casting.rules_in_force import following, note_read  # noqa: PLC0415

    entered = torch.autocast.__enter__
    blocks: Counter[tuple[str, torch.dtype]] = Counter()

    @functools.wraps(entered)  # TorchScript looks the method up by name
    def enter(block: Any) -> Any:
        if block._enabled:
            if on_first is not None and (block.device, block.fast_dtype) not in blocks:
                on_first(block.device, block.fast_dtype)
            blocks[block.device, block.fast_dtype] += 1
            note_read(block.device)
            if rules is not None and rules.device_type != block.device:
                warn_of_device(name, rules.device_type, block.device)
        return entered(block)  # type: ignore[no-untyped-call]

    with (
        nullcontext() if rules is None else following(rules, file=name) as pushed,
        replaced(torch.autocast, "__enter__", enter),
        nullcontext() if dtype is None else _dtype_left_open(dtype, on_default),
    ):
        yield blocks
    is_main = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if rules is not None and pushed is not None and not pushed.was_read and is_main:
        print(
            f"amp_plugin: no autocast block on {rules.device_type} was opened, so nothing has read the rules "
            f"of {name}; open torch.autocast({rules.device_type!r}), or leave the file out",
            file=sys.stderr,
        )


@contextmanager
def _dtype_left_open(dtype: torch.dtype, on_default: Callable[[], object]) -> Iterator[None]:
    """Use this dtype in autocast blocks without a dtype, in all threads.

    ``on_default`` is called for each enabled block without a dtype. The classes of torch.cuda.amp and
    torch.cpu.amp have a default dtype. If one of their blocks has the default dtype, it counts as a block
    without a dtype, because the two cannot be told apart.

    ``torch.set_autocast_dtype`` would change the dtype in only one thread. The dtype is also added to the
    keys of torch's compile caches, because the graph itself does not contain it.
    """
    import torch  # noqa: PLC0415

    from amp_plugin.casting.installed_kernels import tag_compile_caches  # noqa: PLC0415

    tag = "amp_plugin autocast "
    with_default = (
        torch.cuda.amp.autocast,  # amp: ignore[AMP013]
        torch.cpu.amp.autocast_mode.autocast,  # amp: ignore[AMP013]
    )
    with ExitStack() as undo:
        for kind in with_default:
            for function in {inspect.unwrap(kind.__init__), inspect.unwrap(kind.__new__)}:
                if dtype_names := getattr(function, "__defaults__", None):
                    chosen = tuple(dtype if isinstance(d, torch.dtype) else d for d in dtype_names)
                    undo.enter_context(replaced(function, "__defaults__", chosen))
        made = torch.autocast.__init__

        @functools.wraps(made)
        def make(block: Any, device_type: str, dtype_given: Any = None, *args: Any, **kwargs: Any) -> None:
            named = kwargs.pop("dtype", dtype_given)
            made(block, device_type, named or dtype, *args, **kwargs)
            if block._enabled and (named is None or (named is dtype and isinstance(block, with_default))):
                on_default()

        undo.enter_context(replaced(torch.autocast, "__init__", make))
        undo.callback(tag_compile_caches, tag, "")
        tag_compile_caches(tag, str(dtype))
        yield


def ours_by_default() -> AbstractContextManager[Pushed]:
    """Run ``torch.autocast`` blocks on amp_plugin's kernels, with the rules of AMP_PLUGIN_RULES if set."""
    import torch  # noqa: PLC0415 - takes seconds

    from amp_plugin.casting.rules import TABLES, OpRules, environment_rules  # noqa: PLC0415
    from amp_plugin.casting.rules_in_force import following  # noqa: PLC0415

    defaults = map(OpRules.default, filter(torch.amp.is_autocast_available, TABLES))
    return following(*defaults, *filter(None, [environment_rules()]))


@cache
def bind_environment() -> None:
    """Apply the rules file named by ``AMP_PLUGIN_RULES`` to the whole process.

    Raises:
        OptionError: the variable does not name a valid rules file.
    """
    variable = "AMP_PLUGIN_RULES"
    given = os.environ.get(variable, "")
    if not given or is_launcher():
        return
    from amp_plugin.casting.rules import environment_rules  # noqa: PLC0415 - most processes return above

    try:
        rules = environment_rules()
    except (OSError, ValueError) as error:
        raise OptionError(variable, given, "the path of a rules file", str(error)) from error
    bound = ExitStack()
    bound.enter_context(bound_autocast(rules, f"{variable}={given}"))
    atexit.register(bound.close)


def is_launcher() -> bool:
    """Return whether this process is a launcher such as torchrun, or an ``amp-plugin`` command."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    names = {Path(sys.argv[0] if sys.argv else "").name, getattr(main, "name", "")}
    return bool(names & _LAUNCHERS)
