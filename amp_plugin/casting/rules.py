"""Op rules state, for each op and device type, the dtype in which autocast runs the op."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import yaml

from amp_plugin.casting.op_names import (
    check_arguments,
    dtype_overload,
    is_registered,
    names_an_op,
    nearest,
    overloads_of,
)
from amp_plugin.messages import did_you_mean, warn_user
from amp_plugin.precision import known_precision

TABLES: Final = ("cpu", "cuda", "mps", "xpu")

RELEASES: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The torch releases whose autocast op lists are in the tables."""


def listed_rules(device_type: str, release: str) -> dict[str, str]:
    """Return the autocast rules of a torch release, as a dict from op name to rule.

    Ops that the installed torch lacks are included. Releases after the last one in ``RELEASES`` get the rules
    of the last one.
    """
    table = _table(device_type)
    since, until = table.get("since", {}), table.get("until", {})
    return {
        op: group["rule"]
        for group in table["groups"]
        for op in group["ops"]
        if not (op in since and is_older(release, since[op]))
        if not (op in until and not is_older(release, until[op]))
    }


@cache
def _table(device_type: str) -> dict[str, Any]:
    if device_type not in TABLES:
        msg = f"no autocast rules for device {device_type!r}; allowed: {', '.join(TABLES)}"
        raise ValueError(msg)
    file = resources.files("amp_plugin.casting") / "tables" / f"{device_type}.yaml"
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def is_older(release: str, than: str) -> bool:
    """Return whether a torch release such as ``"2.9"`` is older than another such as ``"2.12"``."""
    first, second = ([int(number) for number in name.split(".")[:2]] for name in (release, than))
    return first < second


def torch_release() -> str:
    """Return the release of the installed torch, such as ``"2.13"``."""
    return ".".join(torch.__version__.split(".")[:2])


_KEYS = {"device_type": "", "rules": {}, "torch": "", "base": ""}  # keys of a rules file


def read_rules_file(path: str | Path) -> dict[str, Any]:
    """Return the contents of a rules file without looking up its ops. Raise ValueError if a key is wrong."""
    return _checked_keys(yaml.safe_load(Path(path).read_text(encoding="utf-8")))


def _checked_keys(data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        msg = f"a rules file is a mapping with the keys device_type and rules, got {data!r}"
        raise ValueError(msg)  # noqa: TRY004 - of the file, not of an argument
    for key in data.keys() - _KEYS.keys():
        near = did_you_mean(str(key), _KEYS, at_most=3, separator=", ")
        msg = f"unknown key {key!r}{near}; allowed: {', '.join(_KEYS)}"
        raise ValueError(msg)
    file = _KEYS | {key: value for key, value in data.items() if value is not None}
    if not file["device_type"]:
        msg = f"the key device_type is missing; give one of {', '.join(TABLES)}"
        raise ValueError(msg)
    if not isinstance(file["rules"], Mapping):
        msg = f"rules: give a mapping of op to rule (aten::softmax.int: fp32), got {file['rules']!r}"
        raise ValueError(msg)  # noqa: TRY004
    if not isinstance(file["torch"], str) or not re.match(r"\d+\.\d+(?!\d)|$", file["torch"]):
        msg = f"torch: give the version as text, torch: '2.13', got {file['torch']!r}"
        raise ValueError(msg)
    return file


class OpRule(str, Enum):
    """What autocast does with the floating-point tensor arguments of an op.

    Values:
        LOWER_PRECISION: cast to the region's dtype (fp16 or bf16).
        FP32: cast to fp32.
        FP32_SET_OPT_DTYPE: pass ``dtype=torch.float32`` to the op if the caller gave no dtype.
        FP32_APPEND_DTYPE: call the op's overload that takes a dtype, with ``dtype=torch.float32``. PROMOTE:
        cast all arguments to the widest dtype among them. BANNED: raise an error that names a safe
        alternative to the op. UNCHANGED: run the op in the dtypes of its arguments.

    Source: the op lists of torch.amp, pytorch/aten/src/ATen/autocast_mode.h.
    """

    LOWER_PRECISION = "lower_precision"
    FP32 = "fp32"
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    PROMOTE = "promote"
    BANNED = "banned"
    UNCHANGED = "unchanged"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        allowed = [rule.value for rule in cls]
        word = known_precision(str(value).lower()) or str(value)  # dtype names are allowed too
        near = nearest({"fp16": "lower_precision", "bf16": "lower_precision"}.get(word, word), allowed)
        msg = f"unknown rule {value!r}{near}; allowed: {', '.join(allowed)}"
        raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRules:
    """The autocast rules of one device type, and the op arguments that are never cast.

    An OpRules object is immutable, and ``with_rule`` returns a changed copy. Equal objects have equal hashes
    and equal ``content``.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.
        rules: maps the full name of an op (``"aten::softmax.int"``, ``"aten::mm.default"``) to its rule.
        keep: maps the full name of an op to the names of arguments that are never cast.

    Raises:
        ValueError: the device, an op or a rule is unknown, or an op is not given by its full name.

    Attributes:
        content: the differences from the rules of the installed torch, as JSON. A compiled graph
            stores ``content`` as a constant, to say which rules the graph uses.

    Example:
        >>> rules = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
        >>> rules["aten::softmax.int"]
        <OpRule.FP32: 'fp32'>
        >>> rules.diff(OpRules.default("cpu"))
        {'aten::softmax.int': ('fp32', 'unchanged')}
    """

    device_type: str
    rules: Mapping[str, OpRule]
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)
    content: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the device type and the op names, and sort the rules."""
        _table(self.device_type)  # raises if the device has no table
        for op in self.rules:
            known = isinstance(op, str) and is_registered(op)
            if not known and (full := overloads_of(op)) != [op]:
                msg = f"{op!r} is not a full name. with_rule() accepts it, but here give {', '.join(full)}"
                raise ValueError(msg)
        rules = {op: OpRule(rule) for op, rule in sorted(self.rules.items())}
        keep = {op: frozenset(args) for op, args in sorted(self.keep.items()) if args}
        base = _listed_ops(self.device_type, torch_release())
        ops = sorted({*base, *rules})
        content = {
            "device_type": self.device_type,
            "torch": torch_release(),
            # None means that the op has no rule.
            "rules": {op: rules.get(op) for op in ops if rules.get(op) != base.get(op)},
            "keep": {op: sorted(arguments) for op, arguments in keep.items()},
        }
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "content", json.dumps(content))

    @staticmethod
    def default(device_type: str) -> OpRules:
        """Return the default autocast rules of the installed torch for a device type."""
        return _listed(device_type, torch_release())

    @staticmethod
    def named(policy: str, device_type: str) -> OpRules:
        """Return the autocast rules of a given torch release, whichever release is installed.

        Torch's op lists change between releases. For example, ``rms_norm`` on CUDA has run in fp32 since
        torch 2.12. The rules of a named policy never change. Ops that the installed torch lacks are left out.

        Args:
            policy: ``"torch-2.11"`` to ``"torch-2.15"``.
            device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.

        Raises:
            ValueError: the policy or the device is unknown. The error names the most similar one.

        Example:
            >>> OpRules.named("torch-2.11", "cuda").diff(OpRules.named("torch-2.12", "cuda"))
            {'aten::rms_norm.default': ('unchanged', 'fp32')}
        """
        names = [f"torch-{release}" for release in RELEASES]
        if policy not in names:
            near = did_you_mean(policy, names, separator=", ")
            msg = f"unknown policy {policy!r}{near}; allowed: {', '.join(names)}"
            raise ValueError(msg)
        return _listed(device_type, policy.removeprefix("torch-"))

    @staticmethod
    def from_yaml(path: str | Path) -> OpRules:
        """Read op rules from a YAML file, which states how the rules differ from the default rules.

        If the file was written for another torch release, a warning lists default rules that have changed
        since then, and ops that the installed torch lacks. Rules for missing ops are left out.

        Args:
            path: a YAML file with the keys ``device_type`` and ``rules``. Each rule is ``op: rule`` or ``op:
                {rule: ..., keep: [argument, ...]}``. The optional key ``torch`` is the torch release for
                which the file was written. The optional key ``base`` names the policy to start from instead
                of the default rules, as in ``OpRules.named``.

        Raises:
            ValueError: a key, op, rule or argument is unknown. The text names the nearest.
        """
        try:
            return OpRules._from_keys(read_rules_file(path), str(path))
        except (ValueError, yaml.YAMLError) as error:
            msg = f"{path}: {error}"
            raise ValueError(msg) from error

    @staticmethod
    def from_mapping(given: Mapping[str, Any]) -> OpRules:
        """Return op rules from a mapping, which states how the rules differ from the default rules.

        Args:
            given: a mapping with the same keys as a file for ``from_yaml``.

        Raises:
            ValueError: a key, op, rule or argument is unknown. The text names the nearest.

        Example:
            >>> rules = OpRules.from_mapping({"device_type": "cpu", "rules": {"aten::mm": "fp32"}})
            >>> rules["aten::mm"].value
            'fp32'
        """
        return OpRules._from_keys(_checked_keys(given), "the mapping of rules")

    @staticmethod
    def _from_keys(file: Mapping[str, Any], source: str) -> OpRules:
        default = OpRules.default(file["device_type"])
        rules = OpRules.named(file["base"], default.device_type) if file["base"] else default
        release = ".".join(file["torch"].split(".")[:2]) or torch_release()
        gone = [op for op in file["rules"] if release != torch_release() and not names_an_op(op)]
        for op, entry in file["rules"].items():
            if op not in gone:
                given = entry if isinstance(entry, Mapping) else {"rule": entry}
                rules = rules.with_rule(op, given.get("rule"), keep=given.get("keep", ()))
        then = default if file["base"] else _listed(default.device_type, release)
        changes = [f"there is no {op}, its rule is left out" for op in gone]
        changes += _changes(release, then, default)
        if changes:
            since = f"{source} was written for torch {release}; in torch {torch_release()} "
            warn_user(since + "; ".join(changes))
        return rules

    def to_yaml(self) -> str:
        """Return the differences from the default rules as YAML text for ``from_yaml``."""
        base = OpRules.default(self.device_type)
        changed = {op: self[op].value for op in self.diff(base) if self.keep.get(op) == base.keep.get(op)}
        kept = {op: {"rule": self[op].value, "keep": sorted(args)} for op, args in self.keep.items()}
        head = {"device_type": self.device_type, "torch": torch_release()}
        return str(yaml.safe_dump({**head, "rules": {**changed, **kept}}, sort_keys=False))

    def with_rule(self, op: object, rule: str | OpRule | None = None, *, keep: Iterable[str] = ()) -> OpRules:
        """Return a copy of these rules with a changed rule for one op.

        Args:
            op: an overload (``"aten::softmax.int"`` or ``torch.ops.aten.softmax.int``), an op
                (``"aten::softmax"`` or ``torch.ops.aten.softmax``) or a custom op (``"mylib::op"``). If no
                overload is named, the rule applies to all overloads of the op that return a new tensor.
                Arguments that a custom op writes into are never cast.
            rule: a value of OpRule. None keeps the op's current rule.
            keep: the names of arguments that are never cast.

        Raises:
            ValueError: the op, rule or argument is unknown, or the op is an in-place or ``out=`` variant. The
                error message suggests the most similar known name.
        """
        names = overloads_of(op)
        given = None if rule is None else OpRule(rule)
        rules, kept = dict(self.rules), dict(self.keep)
        wanted = frozenset(keep)
        for name in names:
            rules[name] = given or self[name]
            if rules[name] is OpRule.FP32_APPEND_DTYPE and dtype_overload(name) is None:
                msg = f"{name} has no overload that takes a dtype after its arguments; use 'fp32' for it"
                raise ValueError(msg)
            check_arguments(name, wanted)
            kept[name] = wanted or kept.get(name, frozenset())
        return OpRules(device_type=self.device_type, rules=rules, keep=kept)

    def as_policy_of(self, device_type: str) -> OpRules:
        """Return a copy of these rules for another device type. For example, use CUDA's rules on the CPU."""
        return OpRules(device_type=device_type, rules=self.rules, keep=self.keep)

    def diff(self, other: OpRules) -> dict[str, tuple[str, str]]:
        """Return a dict of the ops whose rules differ. Each value is (rule in self, rule in ``other``)."""
        ops = sorted({*self.rules, *other.rules, *self.keep, *other.keep})
        described = {op: (self.described(op), other.described(op)) for op in ops}
        return {op: pair for op, pair in described.items() if pair[0] != pair[1]}

    def fingerprint(self) -> str:
        """Return a hash of the content (16 hexadecimal digits), which is the same in all processes."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:16]

    def described(self, op: str) -> str:
        """Return an op's rule and the arguments that are never cast, as in ``"fp32, keep weight"``."""
        kept = sorted(self.keep.get(op, ()))
        return self[op].value + (f", keep {', '.join(kept)}" if kept else "")

    def __getitem__(self, op: object) -> OpRule:
        """Return the rule of an op. For the names of ops see :meth:`with_rule`.

        Raises:
            ValueError: the op is unknown, or its overloads have different rules.
        """
        if isinstance(op, str) and (op in self.rules or is_registered(op)):
            return self.rules.get(op, OpRule.UNCHANGED)
        found = {name: self.rules.get(name, OpRule.UNCHANGED) for name in overloads_of(op)}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name}: {rule.value}" for name, rule in found.items())
            msg = f"the overloads of {op} have several rules; ask for one of {listed}"
            raise ValueError(msg)
        return next(iter(found.values()))

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        if self == OpRules.default(self.device_type):
            return f"OpRules.default({self.device_type!r})"
        changed = len(self.diff(OpRules.default(self.device_type)))
        return f"<OpRules {self.device_type}: {len(self.rules)} ops, {changed} unlike the default>"


@cache
def _listed(device_type: str, release: str) -> OpRules:
    return OpRules(device_type=device_type, rules=_listed_ops(device_type, release))


@cache
def _listed_ops(device_type: str, release: str) -> dict[str, OpRule]:
    """Return the rules of a torch release for the ops of the installed torch, as a dict from op to rule."""
    listed = listed_rules(device_type, release)
    return {op: OpRule(rule) for op, rule in listed.items() if is_registered(op)}


@cache
def rules_with_content(content: str) -> OpRules:
    """Return the rules that have this ``content``, which may come from another process."""
    read = json.loads(content)
    rules = {**_listed_ops(read["device_type"], read["torch"]), **read["rules"]}
    named = {op: rule for op, rule in rules.items() if rule is not None}
    return OpRules(device_type=read["device_type"], rules=named, keep=read["keep"])


def _changes(release: str, then: OpRules, now: OpRules) -> list[str]:
    """Describe how the default rules have changed since a torch release. Return [] if they have not."""
    changed = [f"{op} is {new} and was {old}" for op, (old, new) in then.diff(now).items()]
    remedy = f" (base: torch-{release} in the file keeps the old ones)" if release in RELEASES else ""
    return [f"the default of {', of '.join(changed)}{remedy}"] if changed else []


RULES_VARIABLE: Final = "AMP_PLUGIN_RULES"


@cache
def _read(path: str) -> OpRules:
    try:
        return OpRules.from_yaml(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        msg = f"{RULES_VARIABLE}={path}: {what}; give the path of a YAML file of rules, or unset the variable"
        raise ValueError(msg) from error


def environment_rules() -> OpRules | None:
    """Return the rules in the file that ``AMP_PLUGIN_RULES`` names, or None if the variable is not set.

    Raises:
        ValueError: the rules cannot be read. The error names the variable.
    """
    path = os.environ.get(RULES_VARIABLE, "")
    return _read(path) if path else None


@cache
def warn_of_device(source: str, theirs: str, device_type: str) -> None:
    """Warn once per process that autocast runs on one device type, but a rules file is for another."""
    warn_user(
        f"{source}: the rules are for {theirs}, so autocast on {device_type} follows the default ones. "
        f"To use the same policy on {device_type}, write device_type: {device_type} into a copy of the "
        "file"
    )
