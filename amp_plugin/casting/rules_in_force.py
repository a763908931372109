"""The op rules in force in this process. They are one stack, and only this module writes it.

A region with ``rules=`` follows its own rules. Each other region, and each block of ``torch.autocast``,
follows the topmost rules on the stack for its device. If the stack has none, regions follow the default rules
on our kernels, and torch's blocks run on torch's kernels.

Rules are pushed and popped by ``set_default_rules``, by ``AMP_PLUGIN_RULES``, by ``amp-plugin run``, by the
trials of ``amp-plugin tune`` and by the adapters. ``csrc/rules_in_force.h`` explains how compiled code sees
which rules are in force.
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
    """Rules on the stack.

    Attributes:
        numbers: maps a device type to the number of its rules.
        file: the file that the rules come from, as the user named it; ``""`` if a program made the rules.
        was_read: True if a region or block on the rules' device has looked up the rules in force and got this
            set.
    """

    numbers: dict[str, int]
    file: str = ""
    was_read: bool = False


_stack: Final[list[Pushed]] = []
# Maps a device type to the rules that set_default_rules has pushed for it.
_set_by_program: Final[dict[str, Pushed]] = {}


def push(*rules: OpRules, file: str = "") -> Pushed:
    """Push rules; return the entry that ``pop`` takes."""
    numbers = {chosen.device_type: number_of(chosen, chosen.device_type) for chosen in rules}
    return _put(Pushed(numbers=numbers, file=file), at=len(_stack))


def _put(pushed: Pushed, *, at: int) -> Pushed:
    _stack.insert(at, pushed)
    try:
        _show()
    except RuntimeError:  # these rules cannot be in force together with another device's rules
        pop(pushed)
        raise
    return pushed


def pop(*pushed: Pushed) -> None:
    """Remove entries from the stack, wherever they are. An entry that is already removed does no harm."""
    _stack[:] = [other for other in _stack if other not in pushed]
    _show()


def _show() -> None:
    """Tell the dispatcher's kernels which rules apply to blocks without their own rules."""
    for device_type in TABLES:
        KERNELS.follow_by_default(device_type, number_on(device_type))


def number_on(device_type: str) -> int:
    """Return the number of the topmost rules for a device; ``NO_RULES`` if there are none."""
    found = [pushed.numbers[device_type] for pushed in _stack if device_type in pushed.numbers]
    return found[-1] if found else NO_RULES


def number_for_region(device_type: str) -> int:
    """Return the number of the rules that a region without its own rules follows.

    The first call also puts the rules of ``AMP_PLUGIN_RULES`` in force, for ``torch.autocast`` blocks too.
    """
    if number_on(device_type) == NO_RULES:
        _push_environment(device_type)
    note_read(device_type)
    return max(DEFAULT, number_on(device_type))


def _push_environment(device_type: str) -> None:
    """Put the rules of ``AMP_PLUGIN_RULES`` at the bottom of the stack, if they are for this device."""
    rules = environment_rules()
    if rules is None:
        return
    if rules.device_type != device_type:
        warn_of_device(f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}", rules.device_type, device_type)
        return
    _put(Pushed(numbers={device_type: number_of(rules, device_type)}), at=0)


def note_read(device_type: str) -> None:
    """Note that a region or block has looked for rules: the topmost rules of its device were read."""
    here = [pushed for pushed in reversed(_stack) if device_type in pushed.numbers]
    from_file = next((pushed.numbers[device_type] for pushed in here if pushed.file), None)
    for pushed in here:
        pushed.was_read |= not pushed.file or pushed.numbers[device_type] == from_file


def set_default_rules(rules: OpRules | None) -> None:
    """Make all autocast blocks of the process follow these rules, blocks of ``torch.autocast`` included.

    A region with ``rules=`` keeps its rules, and so does a region that was made before this call. The rules
    also apply to recomputation by checkpoint, to DataParallel's threads, and to ``torch.autocast`` blocks
    inside models. Call this before other threads compile with ``torch.compile``: rules that differ from
    torch's are guarded in the calling thread only.

    Args:
        rules: the new rules for their device. None removes the rules that this function has set, on all
            devices. After that, blocks follow the rules of ``AMP_PLUGIN_RULES``, ``amp-plugin run`` or a
            framework's run if there are any, and torch's own otherwise.

    Raises:
        TypeError: ``rules`` are not OpRules.
        RuntimeError: the rules differ from torch's and the native core is missing.
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
    """Push rules for a block. Afterwards remove them, and everything that the block left above them."""
    pushed = push(*rules, file=file)
    try:
        yield pushed
    finally:
        if pushed in _stack:
            pop(*_stack[_stack.index(pushed) :])


@contextmanager
def rules_on_trial(rules: OpRules) -> Iterator[None]:
    """Make torch's blocks, and regions without their own rules, follow these rules for one block.

    A process has numbers for a limited count of rule sets. A trial does not use up a number, because the
    number of the default rules stands for the rules on trial. So any number of rule sets can be tried. During
    a trial, compiled functions run eagerly.

    Raises:
        ValueError: ``AMP_PLUGIN_RULES`` is set, so that regions would follow its rules.
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
    """Put torch's own autocast kernels back and empty the stack. The next region installs ours again."""
    clear()
    KERNELS.uninstall()
