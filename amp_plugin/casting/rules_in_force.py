"""Keeps a stack of the op rules that are in force in this process. Only this module changes the stack.

A region with ``rules=`` follows its own rules. All other regions, and all blocks of ``torch.autocast``,
follow the topmost rules on the stack for their device. If the stack has no rules for the device, amp_plugin's
regions follow the default rules. Without rules on the stack, blocks of ``torch.autocast`` run on torch's own
kernels. Rules are pushed and popped by ``set_default_rules``, ``AMP_PLUGIN_RULES``, ``amp-plugin run``,
``amp-plugin tune`` and the adapters. ``csrc/rules_in_force.h`` explains how compiled code sees which rules
are in force.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from amp_plugin.casting.installed_kernels import DEFAULT, KERNELS, NO_RULES, check_rules, number_of
from amp_plugin.casting.rules import RULES_VARIABLE, TABLES, OpRules, environment_rules, warn_of_device
from amp_plugin.kernels.build import require_native


@dataclass(eq=False, kw_only=True, slots=True)
class Pushed:
    """An entry of the stack of op rules.

    Attributes:
        numbers: maps each device type to the number of its rule set.
        file: the path of the rules file, as the user gave it, or ``""`` if the rules come from code.
        was_read: True once an autocast region or block has read the rules of this entry.
    """

    numbers: dict[str, int]
    file: str = ""
    was_read: bool = False


_stack: Final[list[Pushed]] = []
# Maps each device type to the stack entry that set_default_rules has pushed for it.
_set_by_program: Final[dict[str, Pushed]] = {}


def push(*rules: OpRules, file: str = "") -> Pushed:
    """Push rules onto the stack, and return the entry that ``pop`` can remove."""
    numbers = {chosen.device_type: number_of(chosen, chosen.device_type) for chosen in rules}
    return _put(Pushed(numbers=numbers, file=file), at=len(_stack))


def _put(pushed: Pushed, *, at: int) -> Pushed:
    _stack.insert(at, pushed)
    try:
        _show()
    # RuntimeError means that these rules conflict with the rules in force for another device type.
    except RuntimeError:
        pop(pushed)
        raise
    return pushed


def pop(*pushed: Pushed) -> None:
    """Remove entries from anywhere in the stack. Entries that were already removed are ignored."""
    _stack[:] = [other for other in _stack if other not in pushed]
    _show()


def _show() -> None:
    """Tell the autocast kernels which rules apply to blocks that have no rules of their own."""
    for device_type in TABLES:
        KERNELS.follow_by_default(device_type, number_on(device_type))


def number_on(device_type: str) -> int:
    """Return the number that identifies the topmost rule set for a device type, or ``NO_RULES``."""
    found = [pushed.numbers[device_type] for pushed in _stack if device_type in pushed.numbers]
    return found[-1] if found else NO_RULES


def number_for_region(device_type: str) -> int:
    """Return the number that identifies the rule set of a region without rules of its own.

    The first call also pushes the rules of ``AMP_PLUGIN_RULES``, which then apply to ``torch.autocast``
    blocks too.
    """
    if number_on(device_type) == NO_RULES:
        _push_environment(device_type)
    note_read(device_type)
    return max(DEFAULT, number_on(device_type))


def _push_environment(device_type: str) -> None:
    """Push the rules of ``AMP_PLUGIN_RULES`` to the bottom of the stack, if they are for this device type."""
    rules = environment_rules()
    if rules is None:
        return
    if rules.device_type != device_type:
        warn_of_device(f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}", rules.device_type, device_type)
        return
    _put(Pushed(numbers={device_type: number_of(rules, device_type)}), at=0)


def note_read(device_type: str) -> None:
    """Record that an autocast region or block has read the topmost rules for its device type."""
    here = [pushed for pushed in reversed(_stack) if device_type in pushed.numbers]
    from_file = next((pushed.numbers[device_type] for pushed in here if pushed.file), None)
    for pushed in here:
        pushed.was_read |= not pushed.file or pushed.numbers[device_type] == from_file


def set_default_rules(rules: OpRules | None) -> None:
    """Make all autocast blocks of the process follow these rules, including ``torch.autocast`` blocks.

    Regions with ``rules=``, and regions that were made before this call, keep their rules. The new rules also
    apply to recomputation by activation checkpointing, to DataParallel's threads, and to ``torch.autocast``
    blocks inside models. If other threads use ``torch.compile``, call this function before they compile.
    Compiled code checks whether the rules differ from torch's, but only in the thread that called this
    function.

    Args:
        rules: the new rules, which apply to the device type for which they were made. ``None`` removes the
            rules that ``set_default_rules`` has set, on all device types. Autocast blocks then follow rules
            from ``AMP_PLUGIN_RULES``, ``amp-plugin run`` or a framework plugin, or else torch's rules.

    Raises:
        TypeError: ``rules`` are not OpRules.
        RuntimeError: the rules differ from torch's, but the native core is missing.
    """
    if rules is None:
        pop(*_set_by_program.values())
        _set_by_program.clear()
        return
    check_rules(rules)
    pushed = push(rules)
    pop(*filter(None, [_set_by_program.get(rules.device_type)]))
    _set_by_program[rules.device_type] = pushed


def clear() -> None:
    """Empty the stack. The next region reads ``AMP_PLUGIN_RULES`` again."""
    _set_by_program.clear()
    pop(*_stack)


@contextmanager
def following(*rules: OpRules, file: str = "") -> Iterator[Pushed]:
    """Push rules for a block. At the end of the block, pop the rules and all stack entries above them."""
    pushed = push(*rules, file=file)
    try:
        yield pushed
    finally:
        if pushed in _stack:
            pop(*_stack[_stack.index(pushed) :])


@contextmanager
def rules_on_trial(rules: OpRules) -> Iterator[None]:
    """Inside the block, apply rules to ``torch.autocast`` and to regions without rules of their own.

    The number of rule sets per process is limited. Rules that are tried out in this block do not count
    towards the limit on rule sets, because they replace the default rules only temporarily. Any number of
    rule sets can therefore be tried. Inside the block, functions compiled by torch.compile run eagerly.

    Raises:
        ValueError: ``AMP_PLUGIN_RULES`` is set. Regions would follow the rules in the file that this variable
            names, and not ``rules``.
    """
    require_native("a trial of rules")
    if os.environ.get(RULES_VARIABLE):
        given = f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}"
        msg = f"{given} decides which rules regions follow; unset it to try others"
        raise ValueError(msg)
    default = OpRules.default(rules.device_type)
    with torch.compiler.set_stance("force_eager"), following(default):
        KERNELS.put_default(rules)
        try:
            yield
        finally:
            KERNELS.put_default(default)


def uninstall_kernels() -> None:
    """Restore torch's autocast kernels and empty the stack.

    The next region installs amp_plugin's kernels again.
    """
    clear()
    KERNELS.uninstall()
