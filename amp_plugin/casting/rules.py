"""Which dtype each op runs in: rules per op and device, as data."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from amp_plugin.casting.torch_version import torch_older_than

TABLES = ("cpu", "cuda", "mps", "xpu")


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
        msg = f"unknown rule {value!r}{nearest(str(value), allowed)}; allowed: {', '.join(allowed)}"
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
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        try:
            return _from_mapping(data)
        except (ValueError, TypeError) as error:
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
                returns a new tensor; ``"mylib::op"`` for a custom op.
            rule: a value of OpRule; None keeps the rule the op has.
            keep: names of arguments that are never cast.

        Raises:
            ValueError: op, rule or argument is unknown; the text names the nearest.
        """
        names = overloads_of(op)
        given = None if rule is None else OpRule(rule)
        rules, kept = dict(self.rules), dict(self.keep)
        wanted = frozenset(keep)
        for name in names:
            rules[name] = given or self[name]
            if rules[name] is OpRule.FP32_APPEND_DTYPE:
                _check_has_dtype_overload(name)
            _check_arguments(name, wanted)
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

    def __getitem__(self, op: str) -> OpRule:
        return self.rules.get(op, OpRule.UNCHANGED)

    def __hash__(self) -> int:
        return hash((self.device_type, tuple(self.rules.items()), tuple(self.keep.items())))

    def __repr__(self) -> str:
        if self == OpRules.default(self.device_type):
            return f"OpRules.default({self.device_type!r})"
        changed = len(self.diff(OpRules.default(self.device_type)))
        counts = f"{len(self.rules)} ops, {changed} unlike the default"
        return f"<OpRules {self.device_type}: {counts}, {self.fingerprint()}>"


def overloads_of(op: object) -> list[str]:
    """Return the full names of the overloads meant by an op or a name.

    Raises:
        ValueError: the name is not registered; the text names the nearest ones.
    """
    if isinstance(op, torch._ops.OpOverload):
        return [full_name(op._name)]
    name = op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else op
    if not isinstance(name, str) or "::" not in name:
        msg = f"an op is named like 'aten::softmax.int' or given as torch.ops.aten.softmax.int, got {op!r}"
        raise ValueError(msg)
    registered = {full_name(each) for each in torch._C._dispatch_get_all_op_names()}
    if name in registered:
        return [name]
    functional = [
        each for each in registered if each.split(".")[0] == name and not _writes_to_arguments(each)
    ]
    if not functional or "." in name:
        packets = {each.split(".")[0] for each in registered}
        msg = f"unknown op {name!r}{nearest(name, [*registered, *packets])}"
        raise ValueError(msg)
    return sorted(functional)


def full_name(dispatcher_name: str) -> str:
    """Return ``aten::mm.default`` for the dispatcher's ``aten::mm``."""
    return dispatcher_name if "." in dispatcher_name else f"{dispatcher_name}.default"


def dispatcher_name(full: str) -> str:
    """Return the dispatcher's ``aten::mm`` for ``aten::mm.default``."""
    return full.removesuffix(".default")


def schema_of(full: str) -> torch._C.FunctionSchema:
    """Return the schema of an op given by its full name."""
    name, overload = full.split(".", 1)
    return torch._C._get_schema(name, "" if overload == "default" else overload)


def is_registered(full: str) -> bool:
    """Say whether this build of torch has the op (cuDNN's ops are missing on the CPU build)."""
    return torch._C._dispatch_has_kernel(dispatcher_name(full))


def argument_names(full: str) -> list[str]:
    """Return the names of an op's arguments, in order."""
    return [argument.name for argument in schema_of(full).arguments]


def _writes_to_arguments(full: str) -> bool:
    return bool(schema_of(full).is_mutable)


def _check_arguments(full: str, wanted: frozenset[str]) -> None:
    names = argument_names(full)
    for each in sorted(wanted - set(names)):
        msg = f"{full} has no argument {each!r}{nearest(each, names)}; it has {', '.join(names)}"
        raise ValueError(msg)


def dtype_overload(full: str) -> str | None:
    """Return the overload that takes the same arguments and then a dtype, if there is one."""
    arguments, packet = argument_names(full), full.partition(".")[0]
    candidates = [
        each
        for each in torch._C._dispatch_get_all_op_names()
        if each.startswith(f"{packet}.") and each.endswith("dtype")
    ]
    fitting = (each for each in candidates if argument_names(full_name(each)) == [*arguments, "dtype"])
    return next(fitting, None)


def _check_has_dtype_overload(full: str) -> None:
    if dtype_overload(full) is None:
        msg = f"{full} has no overload that takes a dtype after its arguments; use 'fp32' for it"
        raise ValueError(msg)


def nearest(word: str, among: Iterable[str]) -> str:
    """Return ``", did you mean X or Y?"`` for an unknown word, empty if nothing is near."""
    near = difflib.get_close_matches(word, list(among), n=3, cutoff=0.6)
    return f", did you mean {' or '.join(near)}?" if near else ""


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
    if not isinstance(data, Mapping) or "device_type" not in data:
        msg = "a rules file needs the keys device_type and rules"
        raise ValueError(msg)
    unknown = sorted(set(data) - {"device_type", "rules"})
    if unknown:
        msg = f"unknown key {unknown[0]!r}; allowed: device_type, rules"
        raise ValueError(msg)
    rules = OpRules.default(data["device_type"])
    for op, entry in (data.get("rules") or {}).items():
        if isinstance(entry, Mapping):
            rules = rules.with_rule(op, entry.get("rule"), keep=entry.get("keep", ()))
        else:
            rules = rules.with_rule(op, entry)
    return rules
