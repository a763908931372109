"""Which dtype each op runs in: rules per op and device, as data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import yaml

from amp_plugin.casting.op_names import check_arguments, dtype_overload, is_registered, nearest, overloads_of
from amp_plugin.casting.torch_version import torch_older_than
from amp_plugin.did_you_mean import did_you_mean

TABLES = ("cpu", "cuda", "mps", "xpu")

# What people write for a rule who think of the dtype.
_DTYPE_RULES = {
    "fp32": "fp32",
    "float": "fp32",
    "float32": "fp32",
    "fp16": "lower_precision",
    "half": "lower_precision",
    "float16": "lower_precision",
    "bf16": "lower_precision",
    "bfloat16": "lower_precision",
}


class OpRule(str, Enum):
    """How autocast treats the floating-point tensor arguments of an op.

    Values:
        LOWER_PRECISION: cast to the region's dtype (fp16 or bf16).
        FP32: cast to fp32.
        FP32_SET_OPT_DTYPE: pass ``dtype=torch.float32`` where the caller gave no dtype.
        FP32_APPEND_DTYPE: call the overload that takes a dtype, with fp32.
        PROMOTE: cast to the widest dtype among the arguments.
        BANNED: raise, with the safe alternative in the text.
        UNCHANGED: run on the dtypes that come in.

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
        word = str(value).lower().removeprefix("torch.")
        near = did_you_mean(word, allowed, aliases=_DTYPE_RULES, at_most=3, separator=", ")
        msg = f"unknown rule {value!r}{near}; allowed: {', '.join(allowed)}"
        raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRules:
    """The rules of one device: op -> rule, and arguments that are never cast.

    Immutable: ``with_rule`` returns another set. Equal sets have equal hashes.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.
        rules: full op name (``"aten::softmax.int"``, ``"aten::mm.default"``) -> rule.
        keep: full op name -> names of the arguments that are never cast.

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

    def __post_init__(self) -> None:
        """Check the device and normalise the values."""
        if self.device_type not in TABLES:
            msg = f"no autocast rules for device {self.device_type!r}; allowed: {', '.join(TABLES)}"
            raise ValueError(msg)
        object.__setattr__(self, "rules", {op: OpRule(rule) for op, rule in sorted(self.rules.items())})
        object.__setattr__(
            self, "keep", {op: frozenset(args) for op, args in sorted(self.keep.items()) if args}
        )

    @staticmethod
    def default(device_type: str) -> OpRules:
        """Return torch's own rules for a device."""
        return _default(device_type)

    @staticmethod
    def from_yaml(path: str | Path) -> OpRules:
        """Read rules that change the default ones of a device.

        Args:
            path: a YAML file with ``device_type`` and ``rules``: op -> rule, or
                op -> ``{rule: ..., keep: [argument, ...]}``.

        Raises:
            ValueError: a key, op, rule or argument is unknown; the text names the nearest.
        """
        try:
            return _from_mapping(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, yaml.YAMLError) as error:
            msg = f"{path}: {error}"
            raise ValueError(msg) from error

    def to_yaml(self) -> str:
        """Return the changes against the default rules, as ``from_yaml`` reads them."""
        base = OpRules.default(self.device_type)
        changed = {op: self[op].value for op in self.diff(base) if self.keep.get(op) == base.keep.get(op)}
        kept = {op: {"rule": self[op].value, "keep": sorted(args)} for op, args in self.keep.items()}
        return str(yaml.safe_dump({"device_type": self.device_type, "rules": {**changed, **kept}}))

    def with_rule(self, op: object, rule: str | OpRule | None = None, *, keep: Iterable[str] = ()) -> OpRules:
        """Return these rules with another rule for one op.

        Args:
            op: ``"aten::softmax.int"`` or ``torch.ops.aten.softmax.int`` for one overload,
                ``"aten::softmax"`` or ``torch.ops.aten.softmax`` for every overload that
                returns a new tensor; ``"mylib::op"`` for a custom op. Arguments that a custom
                op writes into are never cast.
            rule: a value of OpRule; None keeps the rule the op has.
            keep: names of arguments that are never cast.

        Raises:
            ValueError: op, rule or argument is unknown, the text names the nearest; or the op
                writes into a tensor it was given, in place or by ``out=``.
        """
        names = overloads_of(op)
        given = None if rule is None else OpRule(rule)
        rules, kept = dict(self.rules), dict(self.keep)
        wanted = frozenset(keep)
        for name in names:
            rules[name] = given or self[name]
            if rules[name] is OpRule.FP32_APPEND_DTYPE:
                _check_has_dtype_overload(name)
            check_arguments(name, wanted)
            kept[name] = wanted or kept.get(name, frozenset())
        return OpRules(device_type=self.device_type, rules=rules, keep=kept)

    def as_policy_of(self, device_type: str) -> OpRules:
        """Return the same policy for another device, e.g. CUDA's rules on the CPU."""
        return OpRules(device_type=device_type, rules=self.rules, keep=self.keep)

    def diff(self, other: OpRules) -> dict[str, tuple[str, str]]:
        """Return op -> (rule here, rule there) where the two sets differ."""
        ops = sorted({*self.rules, *other.rules, *self.keep, *other.keep})
        described = {op: (self._describe(op), other._describe(op)) for op in ops}
        return {op: pair for op, pair in described.items() if pair[0] != pair[1]}

    def fingerprint(self) -> str:
        """Return a hash of the content, stable between processes (hex, 16 digits)."""
        content = [self.device_type, [*self.rules.items()], [(op, sorted(a)) for op, a in self.keep.items()]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _describe(self, op: str) -> str:
        kept = sorted(self.keep.get(op, ()))
        return self[op].value + (f", keep {', '.join(kept)}" if kept else "")

    def __getitem__(self, op: object) -> OpRule:
        """Return the rule of an op, named as for :meth:`with_rule`.

        Raises:
            ValueError: the op is unknown, or its overloads have several rules.
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
        return hash((self.device_type, tuple(self.rules.items()), tuple(self.keep.items())))

    def __repr__(self) -> str:
        if self == OpRules.default(self.device_type):
            return f"OpRules.default({self.device_type!r})"
        changed = len(self.diff(OpRules.default(self.device_type)))
        counts = f"{len(self.rules)} ops, {changed} unlike the default"
        return f"<OpRules {self.device_type}: {counts}, {self.fingerprint()}>"


@cache
def _default(device_type: str) -> OpRules:
    if device_type not in TABLES:
        msg = f"no autocast rules for device {device_type!r}; allowed: {', '.join(TABLES)}"
        raise ValueError(msg)
    table = resources.files("amp_plugin.casting") / "tables" / f"{device_type}.yaml"
    data = yaml.safe_load(table.read_text(encoding="utf-8"))
    since = data.get("since", {})
    rules = {
        op: OpRule(group["rule"])
        for group in data["groups"]
        for op in group["ops"]
        if is_registered(op) and not (op in since and torch_older_than(since[op]))
    }
    return OpRules(device_type=device_type, rules=rules)


def _from_mapping(data: Any) -> OpRules:
    if not isinstance(data, Mapping):
        msg = f"a rules file is a mapping with the keys device_type and rules, got {_kind(data)}"
        raise TypeError(msg)
    allowed = ("device_type", "rules")
    for key in data:
        if key not in allowed:
            msg = f"unknown key {key!r}{nearest(str(key), allowed)}; allowed: {', '.join(allowed)}"
            raise ValueError(msg)
    if "device_type" not in data:
        msg = f"the key device_type is missing; give one of {', '.join(TABLES)}"
        raise ValueError(msg)
    rules = OpRules.default(data["device_type"])
    entries = data.get("rules") or {}
    if not isinstance(entries, Mapping):
        msg = f"rules: give a mapping of op to rule (aten::softmax.int: fp32), got {_kind(entries)}"
        raise TypeError(msg)
    for op, entry in entries.items():
        if isinstance(entry, Mapping):
            rules = rules.with_rule(op, entry.get("rule"), keep=entry.get("keep", ()))
        else:
            rules = rules.with_rule(op, entry)
    return rules


def _kind(data: Any) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"


def _check_has_dtype_overload(full: str) -> None:
    if dtype_overload(full) is None:
        msg = f"{full} has no overload that takes a dtype after its arguments; use 'fp32' for it"
        raise ValueError(msg)
