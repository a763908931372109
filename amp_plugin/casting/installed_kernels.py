"""Our autocast kernels in torch's dispatcher: installed, taken back, and told the rule sets of the process.

Which dtype an op runs in is stated in ``rules.py`` and applied by ``csrc/autocast_kernel.cpp``, in functors
on torch's autocast dispatch keys. Without the native core, regions are torch's own with the weight cache
off, which follow the default rules.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx.node import has_side_effect
from torch.library import Library, register_fake
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.casting.op_names import argument_names, dispatcher_name, written_arguments
from amp_plugin.casting.rules import (
    RULES_VARIABLE,
    TABLES,
    OpRule,
    OpRules,
    environment_rules,
    warn_of_device,
)
from amp_plugin.kernels.build import NativeCore, native_core, require_native
from amp_plugin.kernels.tracers import outside_tracers

DEFAULT = 0  # the number of the default rules
NO_RULES = -1
MOST_KEPT = 56  # an op's later arguments are cast whatever the rules say

# 0 says that a rule set does not name the op: it runs as if no autocast kernel were registered.
RULE_CODES = {rule: number for number, rule in enumerate(OpRule, start=1)}

# c10::DeviceType of the devices that have op tables.
DEVICE_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13}


class AutocastKernels:
    """What the regions of this process run on.

    Attributes:
        are_native: our kernels are installed; else regions are torch's own.
        enter: the native function that opens a region, and returns whether a torch function mode is on, which
            may record it; None where they are not.
        leave: the one that closes a region, counted from the innermost; it stays for those that are open at
            ``uninstall``.
        checked: arguments of a region that torch found nothing wrong with -> the number of its device,
            if our kernels stand there, whether autocast is on, and the number of its default rules.
        followed: device type -> the rule set that torch's own blocks follow.
        process_rules: the same, where no program has set others.
        asked: device types on which autocast has asked for default rules, with what was bound there.
    """

    def __init__(self) -> None:
        self.are_native = False
        self.enter: Callable[[tuple[Any, ...]], bool] | None = None
        self.leave: Any = None
        self._native: Any = None
        self.followed: dict[str, int] = defaultdict(lambda: NO_RULES)
        self.process_rules: dict[str, int] = {}
        self.asked: set[tuple[str, int]] = set()
        self.checked: dict[tuple[str, torch.dtype | None, bool], tuple[int | None, bool, int]] = {}
        self._lock = threading.Lock()
        self._numbers: dict[OpRules, int] = {}
        self.rule_sets: dict[int, OpRules] = {}  # by number; the default ones are not here
        self.tagged: dict[int, str] = {}  # what torch's compile caches know: number -> fingerprint
        self._step_hook: RemovableHandle | None = None
        self._named: dict[tuple[str, int], set[str]] = defaultdict(set)  # ops that a number ever named

    def install(self) -> NativeCore:
        """Install every device's default rules once per process, if the native core is loaded; return it."""
        core = native_core()
        with self._lock, outside_tracers():
            if not self.are_native and core.extension is not None:
                self._native = core.extension
                for device_type in TABLES:
                    self._define(OpRules.default(device_type), DEFAULT)
                core.extension.never_keep(_is_managed_by_fsdp)
                self._step_hook = register_optimizer_step_post_hook(_after_step)
                self.enter, self.leave = core.extension.enter, core.extension.exit
                self.are_native = True
        return core

    def uninstall(self) -> None:
        """Put torch's own autocast kernels back; the next region made installs ours again."""
        if self._step_hook is not None:
            for device_type in TABLES:
                self.follow_by_default(device_type, NO_RULES)
            self.are_native, self.enter = False, None  # regions that are open can still be closed
            self._native.uninstall()
            self._step_hook.remove()
            self._step_hook = None
        self._numbers.clear()
        self._named.clear()
        self.rule_sets.clear()
        self.process_rules.clear()
        self.tagged.clear()
        self.checked.clear()

    def assigned_number(self, rules: OpRules) -> int:
        """Return the number of a rule set other than the default ones."""
        with self._lock, outside_tracers():
            if rules in self._numbers:
                return self._numbers[rules]
            if len(self._numbers) + 1 >= self._native.MAX_RULE_SETS:
                most = self._native.MAX_RULE_SETS - 1
                msg = f"a process can use {most} rule sets besides the default ones; reuse them"
                raise ValueError(msg)
            number = len(self._numbers) + 1
            self._define(rules, number)
            self._numbers[rules], self.rule_sets[number] = number, rules
            return number

    def put_default(self, rules: OpRules) -> None:
        """Set what the number of the default rules means on their device, for regions made before too."""
        with self._lock, outside_tracers():
            self._define(rules, DEFAULT)

    def _define(self, rules: OpRules, number: int) -> None:
        """Set the dispatcher's functors what a number means on a device."""
        default = OpRules.default(rules.device_type).rules
        named = self._named[rules.device_type, number]
        named.update(rules.rules, rules.keep)
        ops, entries = sorted(named), []
        for op in ops:
            is_ours = op in rules.rules or op in rules.keep  # else it has no rule any more
            written = frozenset() if op in default else written_arguments(op)
            never_cast = rules.keep.get(op, frozenset()) | written if is_ours else frozenset()
            places = enumerate(argument_names(op)) if never_cast else ()
            kept = sum(1 << place for place, name in places if name in never_cast and place < MOST_KEPT)
            entries.append((RULE_CODES[rules[op]] if is_ours else 0) | kept << 8)
        self._native.set_rules(rules.device_type, number, list(map(dispatcher_name, ops)), entries)

    def follow_by_default(self, device_type: str, number: int) -> None:
        """Make autocast blocks outside our regions follow a rule set; ``NO_RULES`` for torch's kernels."""
        if self.are_native:
            self._native.set_default_rules(DEVICE_NUMBERS[device_type], number)
            self.followed[device_type] = number
            self.checked.clear()  # regions made from now on ask again

    def note_asked(self, device_type: str) -> None:
        """Note that a region or block on a device has read the rules that are bound for the process."""
        self.asked.add((device_type, self.process_rules.get(device_type, NO_RULES)))


KERNELS = AutocastKernels()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Forget kept casts after an optimizer's step, also where it moves no version counter.

    In a compiled step an op of the graph does it. Only fused steps need it there: the others move the
    counters of what they write.
    """
    if not is_compiling():
        _forget_casts()
    elif any(group.get("fused") for group in optimizer.param_groups):
        _FORGET_CASTS()


def _forget_casts() -> None:
    native: Any = native_core().extension
    native.forget_casts()


_after_step.leaves_gradients = True  # type: ignore[attr-defined] # else no step is taken in one pass

_LIBRARY: Any = Library("amp_plugin", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("forget_casts() -> ()")
_LIBRARY.impl("forget_casts", _forget_casts, "CompositeExplicitAutograd")
register_fake("amp_plugin::forget_casts", lambda: None, lib=_LIBRARY)
_FORGET_CASTS = torch.ops.amp_plugin.forget_casts.default
has_side_effect(_FORGET_CASTS)


def _is_managed_by_fsdp(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter under FSDP2, which refills it and moves no version counter."""
    if not isinstance(tensor, torch.nn.Parameter):
        return False
    from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415 - loads torch.distributed
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    sharded = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    seen: set[torch.nn.Module] = set()  # the root holds the others
    modules = (module for outer in sharded for _, module in outer.named_modules(memo=seen))
    return any(parameter is tensor for module in modules for parameter in module._parameters.values())


def number_of(rules: OpRules, device_type: str) -> int:
    """Return the number of a rule set for regions on a device, installing it if it is new."""
    check_rules(rules, device_type)
    KERNELS.install()
    if rules == OpRules.default(device_type):
        return DEFAULT
    require_native("a rule set other than the default one")
    number = KERNELS.assigned_number(rules)
    if number not in KERNELS.tagged:
        KERNELS.tagged[number] = rules.fingerprint()
        meant = ",".join(f"{number}={fingerprint}" for number, fingerprint in sorted(KERNELS.tagged.items()))
        tag_compile_caches("amp_plugin rules ", meant)
    return number


def check_rules(rules: OpRules, device_type: str | None = None) -> None:
    """Raise if these are not rules, or not for regions on a device."""
    if not isinstance(rules, OpRules):
        msg = f"rules={rules!r}: an amp_plugin.OpRules is wanted, for example OpRules.from_yaml('rules.yaml')"
        raise TypeError(msg)
    if device_type not in {None, rules.device_type}:
        msg = (
            f"rules for {rules.device_type!r} were given to a region on {device_type!r}; "
            f"use rules.as_policy_of({device_type!r}) or OpRules.default({device_type!r})"
        )
        raise ValueError(msg)


def number_by_default(device_type: str) -> int:
    """Return the number of the rules that regions without rules of their own follow on a device.

    From now on ``torch.autocast`` blocks follow the file that the environment names, too.
    """
    KERNELS.note_asked(device_type)
    if (followed := KERNELS.followed[device_type]) != NO_RULES:
        return followed
    rules = environment_rules()
    if rules is None:
        return DEFAULT
    if rules.device_type != device_type:
        warn_of_device(f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}", rules.device_type, device_type)
        return DEFAULT
    number = number_of(rules, device_type)
    KERNELS.follow_by_default(device_type, number)
    return number


def tag_compile_caches(name: str, value: str) -> None:
    """Make a value that graphs depend on part of the keys of torch.compile's disk caches; ``""`` for none."""
    from torch.compiler import config  # noqa: PLC0415 - read when rules differ from torch's

    others = [part for part in config.cache_key_tag.split("|") if part and not part.startswith(name)]
    config.cache_key_tag = "|".join([*others, *([name + value] if value else [])])


def set_default_rules(rules: OpRules | None) -> None:
    """Make every autocast block of the process follow our rules, torch's own blocks included.

    A region of ours that was given rules keeps them, and so does one that was made before this call.
    Adapters call it for the length of a run: so the rules reach checkpoint's recomputation,
    DataParallel's threads and ``torch.autocast`` blocks inside models. Call it before threads
    compile with ``torch.compile``: only the calling thread's guards see rules unlike torch's.

    Args:
        rules: the rules of their device; None gives torch's kernels back on every device, but where
            ``AMP_PLUGIN_RULES`` or ``amp-plugin run --rules`` has bound rules for the process: those then.

    Raises:
        TypeError: they are not OpRules.
        RuntimeError: other rules than torch's, and no native core.
    """
    if rules is None:
        for device_type in TABLES:
            KERNELS.follow_by_default(device_type, KERNELS.process_rules.get(device_type, NO_RULES))
        return
    check_rules(rules)
    KERNELS.follow_by_default(rules.device_type, number_of(rules, rules.device_type))


@contextmanager
def process_follows(*rules: OpRules) -> Iterator[None]:
    """Set default rules that hold wherever nobody has set others, while the block runs; blocks may nest."""
    process_rules, followed = KERNELS.process_rules, dict(KERNELS.followed)
    numbers = {chosen.device_type: number_of(chosen, chosen.device_type) for chosen in rules}
    KERNELS.process_rules = process_rules | numbers
    for device_type, number in numbers.items():
        KERNELS.follow_by_default(device_type, number)
    try:
        yield
    finally:
        KERNELS.process_rules = process_rules
        for device_type in TABLES:
            KERNELS.follow_by_default(device_type, followed.get(device_type, NO_RULES))


@contextmanager
def rules_on_trial(rules: OpRules) -> Iterator[None]:
    """Make regions without rules of their own, and torch's blocks, follow rules while the block runs.

    Any number of rule sets can be tried: none of them takes one of the process's numbers. Compiled functions
    run eagerly meanwhile. With ``AMP_PLUGIN_RULES`` set, whose rules regions would follow, a ValueError.
    """
    require_native("a trial of rules")
    if os.environ.get(RULES_VARIABLE):
        given = f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}"
        msg = f"{given} decides which rules regions follow; unset it to try others"
        raise ValueError(msg)
    default = OpRules.default(rules.device_type)
    with torch.compiler.set_stance("force_eager"), process_follows(default):
        KERNELS.put_default(rules)
        try:
            yield
        finally:
            KERNELS.put_default(default)
