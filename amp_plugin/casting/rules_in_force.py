"""The op rules in force in this process: one stack, which is written here and nowhere else.

A region that was given ``rules=`` follows those. Every other region, and every block of torch's own, follows
the topmost rules on the stack that are for its device. Without any, regions follow the default rules on our
kernels, and blocks of torch's run on torch's.

``set_default_rules``, the file that ``AMP_PLUGIN_RULES`` names, ``amp-plugin run``, the trials of
``amp-plugin tune`` and the adapters push rules and take them off again. ``csrc/rules_in_force.h`` says how
compiled code sees which rules are in force.
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
        numbers: device type -> the number of the rules for it.
        file: the file they come from, as the user named it; ``""`` if they come from a program.
        was_read: a region or block has looked for rules on their device, and found these.
    """

    numbers: dict[str, int]
    file: str = ""
    was_read: bool = False


_stack: Final[list[Pushed]] = []
_set_by_program: Final[dict[str, Pushed]] = {}  # device type -> what set_default_rules has pushed for it


def push(*rules: OpRules, file: str = "") -> Pushed:
    """Put rules on top, for the devices they are for; return what ``pop`` takes off."""
    numbers = {chosen.device_type: number_of(chosen, chosen.device_type) for chosen in rules}
    return _put(Pushed(numbers=numbers, file=file), at=len(_stack))


def _put(pushed: Pushed, *, at: int) -> Pushed:
    _stack.insert(at, pushed)
    try:
        _show()
    except RuntimeError:  # they cannot be in force next to those of another device
        pop(pushed)
        raise
    return pushed


def pop(*pushed: Pushed) -> None:
    """Take rules off, wherever they stand; those that are off already stay off."""
    _stack[:] = [other for other in _stack if other not in pushed]
    _show()


def _show() -> None:
    """Tell the dispatcher's kernels what blocks without rules of their own follow."""
    for device_type in TABLES:
        KERNELS.follow_by_default(device_type, number_on(device_type))


def number_on(device_type: str) -> int:
    """Return the number of the topmost rules for a device; ``NO_RULES`` if there are none."""
    found = [pushed.numbers[device_type] for pushed in _stack if device_type in pushed.numbers]
    return found[-1] if found else NO_RULES


def number_for_region(device_type: str) -> int:
    """Return the number of the rules that a region without rules of its own follows.

    From now on ``torch.autocast`` blocks follow the file that the environment names, too.
    """
    if number_on(device_type) == NO_RULES:
        _push_environment(device_type)
    note_read(device_type)
    return max(DEFAULT, number_on(device_type))


def _push_environment(device_type: str) -> None:
    """Put the rules that the environment names at the bottom, if they are for a device."""
    rules = environment_rules()
    if rules is None:
        return
    if rules.device_type != device_type:
        warn_of_device(f"{RULES_VARIABLE}={os.environ[RULES_VARIABLE]}", rules.device_type, device_type)
        return
    _put(Pushed(numbers={device_type: number_of(rules, device_type)}), at=0)


def note_read(device_type: str) -> None:
    """Note that a region or block looks for rules: of the files it finds the topmost one's."""
    here = [pushed for pushed in reversed(_stack) if device_type in pushed.numbers]
    from_file = next((pushed.numbers[device_type] for pushed in here if pushed.file), None)
    for pushed in here:
        pushed.was_read |= not pushed.file or pushed.numbers[device_type] == from_file


def set_default_rules(rules: OpRules | None) -> None:
    """Make every autocast block of the process follow our rules, torch's own blocks included.

    A region of ours that was given rules keeps them, and so does one that was made before this call.
    The rules reach checkpoint's recomputation, DataParallel's threads and ``torch.autocast`` blocks inside
    models. Call it before threads compile with ``torch.compile``: only the calling thread's guards see rules
    unlike torch's.

    Args:
        rules: the rules of their device. None takes off what this function has set, on every device. Then
            the rules of ``AMP_PLUGIN_RULES``, ``amp-plugin run`` or a framework's run are followed, if there
            are any, and torch's kernels otherwise.

    Raises:
        TypeError: they are not OpRules.
        RuntimeError: other rules than torch's, and no native core.
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
    """Take off everything, the environment's too; the next region reads the environment again."""
    _set_by_program.clear()
    pop(*_stack)


@contextmanager
def following(*rules: OpRules, file: str = "") -> Iterator[Pushed]:
    """Push rules while the block runs, and take off what it has left on top of them too."""
    pushed = push(*rules, file=file)
    try:
        yield pushed
    finally:
        if pushed in _stack:
            pop(*_stack[_stack.index(pushed) :])


@contextmanager
def rules_on_trial(rules: OpRules) -> Iterator[None]:
    """Make regions without rules of their own, and torch's blocks, follow rules while the block runs.

    Any number of rule sets can be tried: none of them takes one of the process's numbers. Instead the number
    of the default rules means these rules. Compiled functions run eagerly meanwhile.

    Raises:
        ValueError: ``AMP_PLUGIN_RULES`` is set, whose rules regions would follow.
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
    """Put torch's own autocast kernels back, and take all rules off; the next region installs ours again."""
    clear()
    KERNELS.uninstall()
