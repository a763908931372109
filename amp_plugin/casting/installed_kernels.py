"""Installs amp_plugin's autocast kernels in torch's dispatcher, and passes them the op rules.

``rules.py`` states the dtype in which each op runs. ``csrc/autocast_kernel.cpp`` contains the kernels that
apply these rules. The kernels are registered for torch's autocast dispatch keys. If the native core is
missing, regions are ``torch.autocast`` blocks with the default rules and no cast cache.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx.node import has_side_effect
from torch.library import Library, register_fake
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from amp_plugin.casting.op_names import argument_names, dispatcher_name, written_arguments
from amp_plugin.casting.rules import (
    TABLES,
    OpRule,
    OpRules,
)
from amp_plugin.kernels.build import NativeCore, native_core, require_native
from amp_plugin.kernels.tracers import outside_tracers

DEFAULT = 0  # the number of the default rules
NO_RULES = -1
# Only the first 56 arguments of an op can be excluded from casts.
MOST_KEPT = 56

# The code 0 means no rule: the op runs as if it had no autocast kernel.
RULE_CODES = {rule: number for number, rule in enumerate(OpRule, start=1)}

# Maps each device type that has op rules to its number in c10::DeviceType.
DEVICE_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13}

Opening = tuple[int | None, torch.dtype, bool, bool, int, str]
"""The arguments with which the kernels open a region.

The items are the device number (or None if amp_plugin's kernels are not installed on the device), the dtype,
whether autocast is on, whether casts are kept, the number of the rule set, and the device type.
"""


class AutocastKernels:
    """Installs the native autocast kernels in this process, and numbers the op rule sets that they use.

    Attributes:
        native: the native core while amp_plugin's kernels are installed, else None. If ``native`` is None,
            regions are ``torch.autocast`` blocks.
        leave: a function that closes an autocast region, given the number of regions that are open inside it.
            ``leave`` stays set after the kernels are uninstalled, because regions may still be open.
        checked: holds two Opening tuples for each combination of device type, dtype and ``enabled`` that
            torch has accepted. The first Opening opens a region without a cast cache, and the second opens a
            region with a cast cache. If the dtype is None, an Opening contains the autocast dtype that torch
            used when the settings were checked.
    """

    def __init__(self) -> None:
        self.native: Any = None
        self.leave: Any = None
        self.checked: dict[tuple[str, torch.dtype | None, bool], tuple[Opening, Opening]] = {}
        self._lock = threading.Lock()
        # Maps each rule set to its number 1, 2, ... in order. The default rules are not in this dict.
        self._numbers: dict[OpRules, int] = {}
        # Maps each rule set number to the rule set's fingerprint, which is a key of torch's compile caches.
        self._tagged: dict[int, str] = {}
        self._step_hook: RemovableHandle | None = None
        # Maps (device type, rule set number) to all ops that have ever had a rule in that rule set.
        self._named: dict[tuple[str, int], set[str]] = defaultdict(set)

    def install(self) -> NativeCore:
        """Install the default rules of all device types once per process, and return the native core.

        If the native core is missing, nothing is installed.
        """
        core = native_core()
        with self._lock, outside_tracers():
            if self.native is None and core.extension is not None:
                self.native, self.leave = core.extension, core.extension.exit
                for device_type in TABLES:
                    self._define(OpRules.default(device_type), DEFAULT)
                self.native.never_keep(_is_managed_by_fsdp)
                self._step_hook = register_optimizer_step_post_hook(_after_step)
        return core

    def uninstall(self) -> None:
        """Restore torch's autocast kernels. The next new region installs amp_plugin's kernels again."""
        if self._step_hook is not None:
            self._step_hook.remove()
            self.native.uninstall()
            self._step_hook = self.native = None
        self._numbers.clear()
        self._tagged.clear()
        self._named.clear()
        self.checked.clear()

    def rules_numbered(self, number: int) -> OpRules | None:
        """Return the rule set that has this number, or None for the default rules."""
        return None if number == DEFAULT else list(self._numbers)[number - 1]

    def assigned_number(self, rules: OpRules) -> int:
        """Return the number that identifies a rule set other than the default rules."""
        with self._lock, outside_tracers():
            if rules in self._numbers:
                return self._numbers[rules]
            if len(self._numbers) + 1 >= self.native.MAX_RULE_SETS:
                most = self.native.MAX_RULE_SETS - 1
                msg = f"a process can use {most} rule sets besides the default ones; reuse them"
                raise ValueError(msg)
            number = len(self._numbers) + 1
            self._define(rules, number)
            self._numbers[rules] = number
            return number

    def tag_caches(self, rules: OpRules) -> None:
        """Add the numbers and fingerprints of rule sets to the keys of torch's compile caches."""
        if (number := self._numbers[rules]) not in self._tagged:
            self._tagged[number] = rules.fingerprint()
            meant = ",".join(
                f"{number}={fingerprint}" for number, fingerprint in sorted(self._tagged.items())
            )
            tag_compile_caches("amp_plugin rules ", meant)

    def put_default(self, rules: OpRules) -> None:
        """Use ``rules`` as the default rules, including in autocast regions that already exist."""
        with self._lock, outside_tracers():
            self._define(rules, DEFAULT)

    def _define(self, rules: OpRules, number: int) -> None:
        """Tell the autocast kernels that ``number`` stands for ``rules`` on the rules' device type."""
        default = OpRules.default(rules.device_type).rules
        named = self._named[rules.device_type, number]
        named.update(rules.rules, rules.keep)
        ops, entries = sorted(named), []
        for op in ops:
            is_ours = op in rules.rules or op in rules.keep  # False if the op no longer has a rule
            written = frozenset() if op in default else written_arguments(op)
            never_cast = rules.keep.get(op, frozenset()) | written if is_ours else frozenset()
            places = enumerate(argument_names(op)) if never_cast else ()
            kept = sum(1 << place for place, name in places if name in never_cast and place < MOST_KEPT)
            entries.append((RULE_CODES[rules[op]] if is_ours else 0) | kept << 8)
        self.native.set_rules(rules.device_type, number, list(map(dispatcher_name, ops)), entries)

    def follow_by_default(self, device_type: str, number: int) -> None:
        """Make ``torch.autocast`` blocks follow a rule set, or run torch's kernels (``NO_RULES``)."""
        if self.native is not None:
            self.native.set_default_rules(DEVICE_NUMBERS[device_type], number)
            self.checked.clear()  # new regions check their arguments again


KERNELS = AutocastKernels()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Drop cached casts of weights after each step, because some optimizers change no version counters.

    If the step of a fused optimizer is compiled, an op in the graph drops the cached casts. Compiled steps of
    other optimizers change the version counters of the weights.
    """
    if not is_compiling():
        _forget_casts()
    elif any(group.get("fused") for group in optimizer.param_groups):
        _FORGET_CASTS()


def _forget_casts() -> None:
    native: Any = native_core().extension
    native.forget_casts()


_LIBRARY: Any = Library("amp_plugin", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("forget_casts() -> ()")
_LIBRARY.impl("forget_casts", _forget_casts, "CompositeExplicitAutograd")
register_fake("amp_plugin::forget_casts", lambda: None, lib=_LIBRARY)
_FORGET_CASTS = torch.ops.amp_plugin.forget_casts.default
has_side_effect(_FORGET_CASTS)


def _is_managed_by_fsdp(tensor: torch.Tensor) -> bool:
    """Return whether FSDP2 manages a parameter.

    FSDP2 writes to parameters without changing their version counters.
    """
    if not isinstance(tensor, torch.nn.Parameter):
        return False
    from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415 - loads torch.distributed
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    sharded = [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]
    seen: set[torch.nn.Module] = set()  # skips submodules already seen
    modules = (module for outer in sharded for _, module in outer.named_modules(memo=seen))
    return any(parameter is tensor for module in modules for parameter in module._parameters.values())


def number_of(rules: OpRules, device_type: str) -> int:
    """Return the number that identifies a rule set on a device type. New rule sets are installed first."""
    check_rules(rules, device_type)
    KERNELS.install()
    if rules == OpRules.default(device_type):
        return DEFAULT
    require_native("a rule set other than the default one")
    number = KERNELS.assigned_number(rules)
    KERNELS.tag_caches(rules)
    return number


def check_rules(rules: OpRules, device_type: str | None = None) -> None:
    """Raise an error if ``rules`` are not OpRules, or are for another device type."""
    if not isinstance(rules, OpRules):
        msg = (
            f"rules={rules!r}: give an amp_plugin.OpRules, for example OpRules.from_yaml('rules.yaml'), or "
            "OpRules.from_mapping({...}) for a mapping"
        )
        raise TypeError(msg)
    if device_type not in {None, rules.device_type}:
        msg = (
            f"rules for {rules.device_type!r} were given to a region on {device_type!r}; "
            f"use rules.as_policy_of({device_type!r}) or OpRules.default({device_type!r})"
        )
        raise ValueError(msg)


def tag_compile_caches(name: str, value: str) -> None:
    """Add a value to the keys of torch.compile's disk caches, because compiled graphs depend on this value.

    "" removes it.
    """
    from torch.compiler import config  # noqa: PLC0415 - only for rules unlike torch's

    others = [part for part in config.cache_key_tag.split("|") if part and not part.startswith(name)]
    config.cache_key_tag = "|".join([*others, *([name + value] if value else [])])
