"""Which rules are in force: number the rule sets in use, and choose the default one."""

from __future__ import annotations

from pathlib import Path

from amp_plugin.casting.autocast_kernels import DEFAULT, KERNELS, NO_RULES
from amp_plugin.casting.environment_rules import environment_rules
from amp_plugin.casting.rule_tables import TABLES
from amp_plugin.casting.rules import OpRules
from amp_plugin.kernels.build import require_native

_TAG = "amp_plugin:"


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
    KERNELS.install()
    if rules == OpRules.default(device_type):
        return DEFAULT
    require_native("a rule set other than the default one")
    number, is_new = KERNELS.number_of(rules)
    if is_new:
        _tag_compile_caches()
    return number


def number_by_default(device_type: str) -> int:
    """Return the number of the rules that regions without rules of their own follow on a device.

    Those of ``set_default_rules`` come first, then the file that the environment names: ``torch.autocast``
    blocks follow it from now on, too.

    Raises:
        ValueError: the file is missing or holds no rules.
        RuntimeError: it holds other rules than the default ones, and there is no native core.
    """
    if (followed := KERNELS.followed(device_type)) != NO_RULES:
        return followed
    rules = environment_rules(device_type)
    if rules is None:
        return DEFAULT
    number = number_of(rules, device_type)
    KERNELS.follow_by_default(device_type, number)
    return number


def _tag_compile_caches() -> None:
    """Say in torch.compile's disk caches what this process means by the numbers of its rule sets."""
    from torch.compiler import config  # noqa: PLC0415 - read when rules differ from torch's

    others = [part for part in config.cache_key_tag.split("|") if part and not part.startswith(_TAG)]
    numbered = ",".join(f"{number}={rules.fingerprint()}" for number, rules in KERNELS.rule_sets().items())
    config.cache_key_tag = "|".join([*others, _TAG + numbered])


def rules_of(number: int) -> OpRules | None:
    """Return the rule set that has a number; None for the default rules."""
    return KERNELS.rule_sets().get(number)


def set_default_rules(rules: OpRules | None) -> None:
    """Make every autocast block of the process follow our rules, torch's own blocks included.

    A region of ours that was given rules keeps them, and so does one that was made before this call.
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
        for device_type in TABLES:
            KERNELS.follow_by_default(device_type, NO_RULES)
        return
    _check_is_rules(rules)
    KERNELS.follow_by_default(rules.device_type, number_of(rules, rules.device_type))


def _check_is_rules(rules: object) -> None:
    if not isinstance(rules, OpRules):
        is_file = isinstance(rules, Path) or str(rules).endswith((".yaml", ".yml"))
        read = f"OpRules.from_yaml({str(rules)!r})" if is_file else "OpRules.default('cpu')"
        msg = f"rules={rules!r}: an amp_plugin.OpRules is wanted, for example {read}"
        raise TypeError(msg)
