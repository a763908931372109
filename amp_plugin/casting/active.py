"""Which rules are in force: install them in the dispatcher, number them, open and close regions.

With the native core, rules live in functors on torch's autocast dispatch keys. Without it,
regions are torch's own with the weight cache off, which follow the default rules.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_plugin.casting.managed_parameters import is_managed_by_fsdp
from amp_plugin.casting.op_names import argument_names, dispatcher_name, written_arguments
from amp_plugin.casting.rules import TABLES, OpRule, OpRules
from amp_plugin.casting.written_weights import watched_ops
from amp_plugin.kernels.build import NativeCore, native_core, require_native
from amp_plugin.kernels.tracers import outside_tracers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from amp_plugin.casting.region import autocast

DEFAULT = 0
MAX_RULE_SETS = 24
_NO_RULES = -1
_TAG = "amp_plugin:"
# 0 says that a rule set does not name the op: it runs as if no autocast kernel were registered.
_CODES = {rule: number for number, rule in enumerate(OpRule, start=1)}

# c10::DeviceType of the devices that have op tables.
DEVICE_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13}

_lock = threading.Lock()
_numbers: dict[OpRules, int] = {}
_step_hooks: list[RemovableHandle] = []
_per_thread = threading.local()
_written = torch.zeros((), device="cpu")

# Arguments of a region that torch found nothing wrong with -> its device's number, and whether it is on.
checked: dict[tuple[str, torch.dtype | None, bool], tuple[int | None, bool]] = {}

# Set by install(): the native region functions, None on the fallback.
is_installed = False
native_enter: Callable[[autocast, tuple[Any, ...]], None] | None = None
native_exit: Callable[[autocast], bool] | None = None


def install() -> NativeCore:
    """Install the default rules of every device in the dispatcher, once per process.

    Returns:
        The native core; where it is not loaded nothing was installed.
    """
    global is_installed, native_enter, native_exit  # noqa: PLW0603 - what the process runs on
    core = native_core()
    with _lock, outside_tracers():
        if is_installed:
            return core
        if core.region is not None:
            watched = watched_ops()
            for device_type in TABLES:
                _define(OpRules.default(device_type), DEFAULT)
                torch.ops.amp_plugin._watch_writes(device_type, watched)
            _step_hooks.append(register_optimizer_step_post_hook(_weights_changed))
            core.region.keep_only(torch.nn.Parameter, is_managed_by_fsdp)
            native_enter, native_exit = core.region.enter, core.region.exit
        is_installed = True
    return core


def uninstall() -> None:
    """Put torch's own autocast kernels back; the next region made installs ours again."""
    global is_installed, native_enter  # noqa: PLW0603
    if native_enter is not None:
        set_default_rules(None)
        native_enter = None  # regions that are open can still be closed
        torch.ops.amp_plugin._uninstall()
        _step_hooks.pop().remove()
    _numbers.clear()
    is_installed = False
    checked.clear()


def number_of(rules: OpRules | None, device_type: str) -> int:
    """Return the number of a rule set, installing it if it is new.

    Args:
        rules: the rules of a region; None means the default ones.
        device_type: the region's device.

    Raises:
        ValueError: the rules are for another device, or there are too many rule sets.
        TypeError: they are no OpRules.
        RuntimeError: other rules than the default ones, and no native core.
    """
    if rules is None:
        return DEFAULT
    _check_is_rules(rules)
    if rules.device_type != device_type:
        msg = (
            f"rules for {rules.device_type!r} were given to a region on {device_type!r}; "
            f"use rules.as_policy_of({device_type!r}) or OpRules.default({device_type!r})"
        )
        raise ValueError(msg)
    install()
    if rules == OpRules.default(device_type):
        return DEFAULT
    require_native("a rule set other than the default one")
    with _lock, outside_tracers():
        if rules not in _numbers:
            if len(_numbers) + 1 >= MAX_RULE_SETS:
                msg = f"a process can use {MAX_RULE_SETS - 1} rule sets besides the default ones; reuse them"
                raise ValueError(msg)
            _define(rules, len(_numbers) + 1)
            _numbers[rules] = len(_numbers) + 1
            _tag_compile_caches()
        return _numbers[rules]


def _tag_compile_caches() -> None:
    """Say in torch.compile's disk caches what this process means by the numbers of its rule sets."""
    from torch.compiler import config  # noqa: PLC0415 - read when rules differ from torch's

    others = [part for part in config.cache_key_tag.split("|") if part and not part.startswith(_TAG)]
    numbered = ",".join(f"{number}={rules.fingerprint()}" for rules, number in _numbers.items())
    config.cache_key_tag = "|".join([*others, _TAG + numbered])


def rules_of(number: int) -> OpRules | None:
    """Return the rule set that has a number; None for the default rules."""
    return next((rules for rules, known in _numbers.items() if known == number), None)


def has_region() -> bool:
    """Say whether this thread has a region of ours open."""
    if _torch_blocks():
        return True
    return native_enter is not None and bool(torch.ops.amp_plugin._innermost_regions())


def _define(rules: OpRules, number: int) -> None:
    """Give the dispatcher's functors the rules of one set."""
    ops = sorted({*rules.rules, *rules.keep})
    codes = [_CODES[rules[op]] for op in ops]
    default = OpRules.default(rules.device_type).rules
    written = {op: written_arguments(op) for op in ops if op not in default}
    kept = [_bits(op, rules.keep.get(op, frozenset()) | written.get(op, frozenset())) for op in ops]
    names = [dispatcher_name(op) for op in ops]
    torch.ops.amp_plugin._set_rules(rules.device_type, number, names, codes, kept)


def _bits(op: str, kept: frozenset[str]) -> int:
    return sum(1 << index for index, name in enumerate(argument_names(op)) if name in kept) if kept else 0


def set_default_rules(rules: OpRules | None) -> None:
    """Make every autocast block of the process follow our rules, torch's own blocks included.

    Adapters call it for the length of a run: so the rules reach checkpoint's recomputation,
    DataParallel's threads and ``torch.autocast`` blocks inside models. Call it before threads
    compile with ``torch.compile``: only the calling thread's guards see rules unlike torch's.

    Args:
        rules: the rules of their device; None gives torch's kernels back on every device.

    Raises:
        TypeError: they are no OpRules.
        RuntimeError: other rules than torch's, and no native core.
    """
    if rules is None:
        if native_enter is not None:
            for device_type in TABLES:
                torch.ops.amp_plugin._set_default_rules(device_type, _NO_RULES)
        return
    _check_is_rules(rules)
    number = number_of(rules, rules.device_type)
    if native_enter is not None:
        torch.ops.amp_plugin._set_default_rules(rules.device_type, number)


def _check_is_rules(rules: object) -> None:
    if not isinstance(rules, OpRules):
        is_file = isinstance(rules, Path) or str(rules).endswith((".yaml", ".yml"))
        read = f"OpRules.from_yaml({str(rules)!r})" if is_file else "OpRules.default('cpu')"
        msg = f"rules={rules!r}: an amp_plugin.OpRules is wanted, for example {read}"
        raise TypeError(msg)


def invalidate() -> None:
    """Forget every cast weight, in every thread.

    Call it after writing to weights outside a region behind autograd's back, such as
    ``p.data.copy_(ema)`` by a kernel of your own. Optimizer steps do it by themselves.
    """
    if native_enter is not None:
        torch.ops.amp_plugin._invalidate_weight_casts(_written)


def _weights_changed(*_: Any) -> None:
    invalidate()


def blocks_are_recorded() -> bool:
    """Say whether torch.export or ``make_fx(pre_dispatch=True)`` records this thread's autocast blocks.

    Other modes that see torch's functions, as of ``torch.set_default_device``, do not.
    """
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and any(
        isinstance(mode, tracing.PreDispatchTorchFunctionMode)
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


def enter_torch(region: autocast) -> None:
    """Open a region as a block of torch's own, in this thread."""
    block = torch.autocast(region.device, region.fast_dtype, region._enabled, cache_enabled=False)
    block.__enter__()  # type: ignore[no-untyped-call]
    _torch_blocks().append((region, block))


def exit_torch(region: autocast) -> None:
    """Close the innermost block of torch's own that `region` opened in this thread.

    Raises:
        RuntimeError: it has none open here.
    """
    blocks = _torch_blocks()
    for index in reversed(range(len(blocks))):
        if blocks[index][0] is region:
            blocks.pop(index)[1].__exit__(None, None, None)
            return
    msg = "autocast: exit without enter; this region is not open in this thread"
    raise RuntimeError(msg)


def _torch_blocks() -> list[tuple[autocast, torch.autocast]]:
    if not hasattr(_per_thread, "blocks"):
        _per_thread.blocks = []
    blocks: list[tuple[autocast, torch.autocast]] = _per_thread.blocks
    return blocks
