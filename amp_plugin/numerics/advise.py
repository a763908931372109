"""Find the cause of a nan or inf, and say what to do about it.

The first matching row of a table gives the cause and the advice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from amp_plugin.casting.op_names import names_an_op
from amp_plugin.numerics.finding import Cure, Finding, Kind
from amp_plugin.numerics.growth import DIVERGES, GROWN, grown
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Argument, Call
from amp_plugin.numerics.places import Site
from amp_plugin.numerics.values import Held, TensorSummary, is_low_precision, non_finite, summarise
from amp_plugin.precision import short_name

_PRODUCTS = frozenset(
    {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "dot", "linear", "matmul",
     "mkldnn_rnn_layer", "mm", "mv", "vdot"}
)  # fmt: skip
_DIVISIONS = frozenset({"div", "reciprocal", "rsqrt", "true_divide", "addcdiv"})
_LOGS = frozenset({"log", "log10", "log1p", "log2", "logit", "xlogy", "special_xlog1py"})
_ROOTS = frozenset({"linalg_vector_norm", "norm", "pow", "rsqrt", "sqrt", "cdist", "_cdist_forward", "hypot"})
_BOUNDED = frozenset({"acos", "asin", "atanh", "acosh", "erfinv"})
_POLES = frozenset({"digamma", "lgamma", "polygamma", "mvlgamma", "special_zeta", "tan"})
_AVERAGES = frozenset({"std", "var", "std_mean", "var_mean", "nll_loss_forward", "nll_loss2d_forward"})
# Ops whose results can be so close to 1 that 16 bits round them to 1.
_SATURATING = frozenset(
    {"sigmoid", "tanh", "_softmax", "erf", "clamp", "clamp_max", "clamp_min", "cos", "exp"}
)
_AT_ONE = frozenset({"log1p", "logit", *_BOUNDED})  # ops with an infinite value or derivative at 1 or -1
_FROM_ONE = frozenset({"rsub", "sub"})
SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})

# Maps an op that the dispatcher runs to the ops through which a program may have called it.
# Autocast applies its rules to the op that the program calls, not to the op that the dispatcher runs.
_CALLED_AS = {
    "addmm": ("linear", "addmm"),
    "bmm": ("matmul", "bmm"),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "convolution transposed": ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "dot": ("matmul", "dot"),
    "linalg_vector_norm": ("norm", "linalg_vector_norm"),
    "_sparse_addmm": ("_sparse_mm", "_sparse_addmm"),
    "mm": ("linear", "matmul", "mm"),
    "mv": ("matmul", "mv"),
}
# Prefixes and suffixes that an internal op's name has, but that the public op's name does not have.
# Examples of internal ops are _softmax, native_layer_norm and nll_loss_forward.
_WITHIN = re.compile(r"^_?(?:native_)?|_forward$")

_SMALL = " In fp16 an eps below 6e-8 becomes 0: take a larger one, or call float() first."

# The advice for each cause and for each special case of a cause. In the advice, {c} is a _Case.
_ADVICE = {
    "weight": "the weight was not finite before this op: look at the checkpoint, at the initialisation, and "
    "at the last step.",
    "data": "the data was not finite before the first op read it: check it with isfinite() in the data "
    "loader. If the values are there on purpose, replace them before the first op: a mask or where() after "
    "the op does not keep nan out of the gradient.",
    "unwritten": "torch.empty returns memory with arbitrary values: write every element, or use torch.zeros.",
    "collective": "read the reports of the other ranks: the rank that made the nan or inf names the op.",
    "constant": "the program, or a torch function in this line (such as logdet of a negative determinant), "
    "wrote this nan on purpose: leave those elements out before the op; a mask after the op does not keep "
    "nan out of the gradient.",
    "function": "look at what {c.finding.op} computes outside torch: its inputs were finite.",
    "mask": "every position of a row is masked with -inf, and the softmax of such a row is nan. Leave one "
    "position unmasked, or mask with a large negative number and drop the row afterwards.",
    "infinity": "{c.infinite} holds infinities, and inf - inf, inf / inf and 0 * inf are nan: insert the "
    "infinities with masked_fill or where after {c.base}, so that the gradient is masked too.",
    "empty": "{c.base} of too few elements is 0 / 0: check the number of elements first (an empty selection, "
    "or targets that are all ignored), or pass correction=0.",
    "divergence": f"{{c.growing}}{DIVERGES}",
    "pole, root": "the derivative of a root is infinite at 0: add an eps inside the root, sqrt(x + eps), or "
    "rsqrt(x + eps) to divide by it. where() afterwards hides the value but not the gradient.",
    "pole, derivative": "the derivative of {c.forward} is not finite at this input: move the input away from "
    "it (clamp or eps; for equal eigenvalues use cholesky), or mask the input before the op. where() "
    "afterwards hides the value but not the gradient.",
    "pole, division": "{c.base} by 0, in this line or in its backward pass: add an eps to the divisor (if it "
    "is a root, inside the root: rsqrt(x + eps)), or mask it before the division.",
    "pole": "{c.base} is infinite at 0 or at the end of its range: clamp its input, add an eps, or use "
    "log_softmax or logsumexp.",
    "digits": "{c.dtype} rounds numbers between {c.below_one:.6g} and 1 to 1, so a clamp or an eps does not "
    "help: it has too few digits. Compute in fp32 from {c.rounded_by} on: give this op the rule fp32, call "
    "float() on its input, or use logsigmoid, log_softmax or a loss with logits.",
    "domain, length": "an input is shorter than its target: leave this sample out, or pass "
    "zero_infinity=True.",
    "domain": "{c.base} is not defined for these inputs: clamp them into its range, away from the ends. (A "
    "small negative number may be a 0 with a rounding error.)",
    "loss scale": "{c.overflow}. The loss scale may still be too large; then GradScaler halves it. If steps "
    "are skipped again and again, make the loss smaller.",
    "range, optimizer": "the optimizer's eps is 0 in this dtype: keep weights in fp32, or raise eps.",
    "range, product": "{c.overflow}: scale the inputs first, as attention divides q by sqrt(d), or "
    "{c.in_fp32}.",
    "range": "{c.overflow}: scale the inputs down first, keep them in fp32, or {c.in_fp32}.",
    "size": "{c.overflow}: clamp its input, subtract the largest number first, as logsumexp does, normalise "
    "the inputs, or initialise the weights smaller. A recurrence with weights above 1 grows at each step.",
}
_ADVICE["range, backward"] = _ADVICE["loss scale"].replace("loss smaller", "loss smaller, or {c.in_fp32}")


def _rows(c: _Case) -> Iterator[tuple[object, str]]:
    """Yield the rows of the table. Each row holds a condition, and the key of the advice for it."""
    base, forward, nan = c.base, c.forward, "nan" in c.finding.held
    yield nan and c.infinite and base in SOFTMAXES, "mask"
    yield nan and c.infinite, "infinity"
    yield c.in_optimizer and c.is_narrow, "range, optimizer"
    yield c.in_optimizer and not nan, "divergence"
    yield nan and (base in _AVERAGES or any(0 in given.shape for given in c.finding.inputs)), "empty"
    if c.is_at_pole:
        yield c.rounded_by, "digits"
        yield forward in _ROOTS, "pole, root"
        yield forward not in {"", base}, "pole, derivative"
        yield base in _DIVISIONS, "pole, division"
        yield True, "pole"
    yield base == "_ctc_loss", "domain, length"
    yield nan, "domain"
    if c.is_narrow:
        is_backward = c.finding.direction == "backward"
        yield is_backward and c.finding.dtype is torch.float16 and base == "_to_copy", "loss scale"
        yield is_backward, "range, backward"
        yield base in _PRODUCTS, "range, product"
        yield True, "range"
    yield True, "size"


@dataclass(frozen=True)
class _Case:
    """A finding whose cause is not known yet, with facts about the program around the op."""

    finding: Finding
    base: str  # the op's plain name, such as "exp"
    growth: float  # the largest factor by which the norm of a weight has grown
    in_optimizer: bool  # whether the op ran in the step of a torch optimizer
    # If a number near 1 was rounded to exactly 1 in 16 bits, the first op that must run in fp32.
    rounded_by: str = ""

    @property
    def dtype(self) -> str:
        """The short name of the dtype of the inputs."""
        return short_name(self.finding.inputs[0].dtype)

    @property
    def below_one(self) -> float:
        """The smallest number that the 16-bit dtype rounds to 1."""
        return 1 - torch.finfo(self.finding.inputs[0].dtype).eps / 4

    @property
    def is_narrow(self) -> bool:
        """Whether the range of fp32 is much larger than the range of the dtype.

        This is true for fp16, but not for bf16.
        """
        return torch.finfo(self.finding.dtype).max < 0.5 * torch.finfo(torch.float32).max

    @property
    def infinite(self) -> str:
        """The name of an argument that contains an inf, or ``""`` if none does."""
        named = [given.name for given in self.finding.inputs if given.inf]
        return next(iter([*named, *(name for name, n in self.finding.numbers if math.isinf(n))]), "")

    @property
    def is_at_pole(self) -> bool:
        """Whether an input is at a point where the op is infinite.

        For a backward op, return whether an input is at a point where the derivative of its forward op is
        infinite.
        """
        base, given, numbers = self.base, self.finding.inputs, dict(self.finding.numbers)
        if base in _DIVISIONS and (numbers.get("other") == 0 or any(map(_reaches_zero, given[-1:]))):
            return True
        if "nan" in self.finding.held:
            return bool(self.finding.forward_op)
        if base in _LOGS:
            return base == "logit" or any(argument.lowest <= -(base == "log1p") for argument in given)
        if base == "pow" and numbers.get("exponent", 0) < 0:
            return any(map(_reaches_zero, given))
        return base in _POLES or (base in _BOUNDED and any(argument.largest >= 1 for argument in given))

    @property
    def forward(self) -> str:
        """For a backward op, the plain name of its forward op. Empty for a user's autograd function."""
        return self.finding.forward_op.partition("::")[2].split(".")[0].strip("_")

    @property
    def growing(self) -> str:
        return grown(self.growth)

    @property
    def overflow(self) -> str:
        sizes = [given.largest for given in self.finding.inputs if not math.isnan(given.largest)]
        is_cast = self.base == "_to_copy"
        what = f"{max(sizes, default=math.inf):.5g}" if is_cast else f"the result of {self.base}"
        dtype = self.finding.dtype
        return f"{what} exceeds {torch.finfo(dtype).max:.5g}, the largest number of {short_name(dtype)}"

    @property
    def in_fp32(self) -> str:
        """A string that says what to change so that the op runs in fp32."""
        finding = self.finding
        rule = f"give {' and '.join(finding.rule_names)} the rule fp32" if finding.rule_names else ""
        if not finding.in_block:
            rule = rule and f"{rule} in an autocast block (none is open here)"
            return " or ".join(filter(None, (rule, "call float() on its input")))
        module = f"run {finding.module} in fp32" if len(finding.cures) > bool(rule) else ""
        return " or ".join(filter(None, (rule, module))) or "call float() with autocast disabled"


def _reaches_zero(given: TensorSummary) -> bool:
    tiny = torch.finfo(given.dtype).smallest_normal
    return given.lowest <= tiny and given.highest >= -tiny


def finding_of(
    tracker: Tracker,
    call: Call,
    kind: Kind,
    result: Tensor,
    held: Held,
    read: Argument | None = None,
    made: Site | None = None,
    source: str = "",
) -> Finding:
    """Describe a nan or inf that an op produced, or that first appeared as an input of an op."""
    op = made.op if made else call.traits.name
    forward_op = call.forward_op if call.is_backward and not made else ""
    given = [read] if read else [a for a in call.arguments if a.name not in call.traits.overwritten]
    inputs = tuple(replace(a.summary, name=tracker.weight(a.tensor) or a.label) for a in given)
    row = f"row {inputs[0].first[0]}" if kind == "input" and len(inputs[0].first) > 1 else ""
    return _finding(
        tracker,
        made or call.site,
        result,
        call.traits.base,
        kind=kind,
        held=held,
        op=op,
        forward_op=forward_op,
        inputs=inputs,
        numbers=tuple(call.numbers.items()),
        rule_names=callers_of(forward_op or op, is_transposed=call.named.get("transposed") is True),
        source=", ".join(filter(None, (source, row))),
        rounded_by=_rounded_by(call) if kind == "made" else None,
    )


def _rounded_by(call: Call) -> Site | None:
    """Return the first op that must run in fp32 so that a number near 1 is not rounded to exactly 1.

    All ops between the last matrix product and the nan or inf need fp32. The first of these ops is returned.
    The nan or inf arises in a later op, whose result or derivative is infinite if its input is exactly 1.
    Return None if rounding to 1 is not the cause.
    """
    if not call.arguments or not is_low_precision(call.arguments[-1].tensor.dtype):
        return None
    sites = []
    for site in call.sites_before():
        base = _plain(site.op)
        if base in _PRODUCTS or base == "_to_copy":
            break
        sites.append((base, site))
    bases = {base for base, _ in sites}
    asks = _plain(call.forward_op) if call.is_backward else call.traits.base
    is_near_one = asks in _AT_ONE or bases & _FROM_ONE
    return sites[-1][1] if is_near_one and bases & _SATURATING else None


def _plain(op: str) -> str:
    """Return the plain name of an op: ``clamp`` for ``aten::clamp_.default``."""
    return op.partition("::")[2].split(".")[0].removesuffix("_")


def finding_of_function(
    tracker: Tracker, site: Site, forward_op: str, output: Tensor, given: Sequence[Tensor]
) -> Finding:
    """Describe a nan or inf that a user's autograd function produced in code that is not a torch op."""
    inputs = tuple(summarise(tensor, f"input {number}") for number, tensor in enumerate(given))
    known: dict[str, Any] = {"kind": "function", "held": non_finite(output), "op": site.op, "inputs": inputs}
    return _finding(tracker, site, output, site.op, forward_op=forward_op, **known)


def _finding(
    tracker: Tracker, site: Site, result: Tensor, base: str, *, rounded_by: Site | None = None, **known: Any
) -> Finding:
    """Return the finding for a result, with its cause, advice, and lines of code that fix it."""
    found = Finding(
        module=site.module,
        place=site.place,
        caller=site.caller,
        in_block=site.in_block,
        dtype=result.dtype,
        output=summarise(result),
        device_type=result.device.type,
        when=tracker.now(),
        **known,
    )
    if rounded_by is not None:
        found = replace(found, rule_names=callers_of(rounded_by.op))
    is_inside = rounded_by is None or rounded_by.module.startswith(found.module)
    address = tracker.address(found.module if is_inside else "")
    cures = cures_of(*address, found.rule_names, found.device_type) if found.in_block else ()
    first = "" if rounded_by is None else f"aten::{_plain(rounded_by.op)}"
    case = _Case(replace(found, cures=cures), base, tracker.growth(), tracker.in_step, first)
    key: str = "data" if found.kind == "input" else found.kind
    if found.kind == "made":
        key = next(key for holds, key in _rows(case) if holds)
        has_diverged = case.growth >= GROWN and tracker.steps > 0
        if has_diverged and not key.startswith(("mask", "empty", "pole")):
            key = "divergence"
    cause = key.partition(",")[0]
    advice = _ADVICE[key].format(c=case) + (_SMALL if cause == "pole" and case.is_narrow else "")
    return replace(found, cause=cause, advice=advice, cures=cures if cause in {"range", "digits"} else ())


def callers_of(op: str, *, is_transposed: bool = False) -> tuple[str, ...]:
    """Return the names of the ops that must get a rule, so that every way of calling ``op`` is covered.

    For ``aten::bmm.default`` the names are ``("aten::matmul", "aten::bmm")``. For most ops, the only name is
    the op's own name. For casts, in-place ops and autograd functions, the result is empty, because no rule
    changes their dtype.
    """
    namespace, _, rest = op.partition("::")
    packet = rest.split(".")[0]
    if packet.endswith("_") or packet == "_to_copy":
        return ()
    called = "scaled_dot_product_attention" if "_scaled_dot_product" in packet else _WITHIN.sub("", packet)
    callers = _CALLED_AS.get(f"{packet} transposed" if is_transposed else packet, (called,))
    names = filter(names_an_op, (f"{namespace}::{name}" for name in callers))
    return tuple(names) or tuple(filter(names_an_op, [f"{namespace}::{packet}"]))


def cures_of(
    model: str, path: str, rule_names: Sequence[str], device_type: str, *, rule: str = "fp32"
) -> tuple[Cure, ...]:
    """Return changes to the program that make an op compute in fp32.

    Args:
        model: The class name of the model.
        path: The path of the module in the model.
        rule_names: The names of the ops that get the rule.
        device_type: The device type whose op rules are changed.
        rule: The rule that these ops get.
    """
    cures = []
    if path:  # if the outermost module ran in fp32, nothing would be left in 16 bits
        place = f"runs the module in fp32: paste after the line that makes the model; model is your {model}"
        code = f'import amp_plugin, torch\namp_plugin.run_in(torch.float32)(model.get_submodule("{path}"))'
        cures.append(Cure(place=place, code=code))
    if rule_names:
        how = "in fp32" if rule == "fp32" else f"with the rule {rule}"
        place = f"runs {' and '.join(rule_names)} {how} in all modules: paste once, before the first step"
        rules = "".join(f'.with_rule("{name}", "{rule}")' for name in rule_names)
        rules = f'amp_plugin.OpRules.default("{device_type}"){rules}'
        cures.append(Cure(place=place, code=f"import amp_plugin\namp_plugin.set_default_rules({rules})"))
    return tuple(cures)
