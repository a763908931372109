"""What to do about a number that is not finite: the op's limits, in words."""

from __future__ import annotations

import math

import torch

from amp_plugin.numerics.finding import Finding
from amp_plugin.numerics.tensor_summary import TensorSummary
from amp_plugin.precision import short_name

_PRODUCTS = frozenset(
    {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "dot", "linear", "matmul",
     "mkldnn_rnn_layer", "mm", "mv", "vdot"}
)  # fmt: skip
_DIVISIONS = frozenset({"div", "reciprocal", "rsqrt", "true_divide", "addcdiv"})
_LOGS = frozenset({"log", "log10", "log1p", "log2", "logit", "xlogy", "special_xlog1py"})
_ROOTS = frozenset({"linalg_vector_norm", "norm", "pow", "rsqrt", "sqrt", "cdist", "_cdist_forward", "hypot"})
_INVERSES = frozenset({"acos", "asin", "atanh", "acosh"})
_SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
_SUMS = frozenset({"sum", "mean", "cumsum", "prod", "linalg_vector_norm", "norm", "_cdist_forward", "dist"})


LARGE_WEIGHT = 100.0
"""Layers begin with weights below 1: one beyond this has most likely grown as the training diverged."""


def advice_for(
    finding: Finding, base: str, exponent: float | None = None, largest_weight: float = 0.0
) -> str:
    """Say in one or two sentences what to do.

    Args:
        finding: without advice.
        base: the op's plain name, ``"exp"``.
        exponent: of ``pow``, where it is a number.
        largest_weight: of the module, as an absolute value.
    """
    if finding.kind != "made":
        return _about_what_came_in(finding)
    if finding.values.nan:
        return _about_nan(finding, base)
    if base in _LOGS and _touches_zero(finding, base):
        return (
            f"{base} of 0 is infinite: clamp its input or add an eps; log_softmax and logsumexp need neither."
        )
    if base in _DIVISIONS and _divides_by_zero(finding):
        return f"{base} by 0: add an eps to the divisor or mask it before the division." + _of_a_root(finding)
    return _about_overflow(finding, base, exponent) + _about_weights(finding, base, largest_weight)


def is_cured_by_fp32(finding: Finding, base: str) -> bool:
    """Say whether an op overflowed a dtype whose range is smaller than fp32's.

    Args:
        finding: without advice.
        base: the op's plain name.
    """
    at_a_pole = (base in _LOGS and _touches_zero(finding, base)) or (
        base in _DIVISIONS and _divides_by_zero(finding)
    )
    return finding.kind == "made" and not finding.values.nan and _is_narrow(finding.dtype) and not at_a_pole


def _about_what_came_in(finding: Finding) -> str:
    return {
        "weight": "look at the checkpoint, at how this weight is initialised, and at the last optimizer "
        "step: it was so before this op read it.",
        "unwritten": "torch.empty and its kin return whatever the memory held: write every element, or use "
        "torch.zeros.",
        "collective": "read the report of the other ranks: the one that made it names the op.",
        "input": "look at the data: it was so before the first op read it. isfinite() in the loader finds "
        "the sample.",
    }[finding.kind]


def _about_nan(finding: Finding, base: str) -> str:  # noqa: PLR0911 - one answer a case
    infinite = [given.name for given in finding.inputs if given.inf]
    if infinite:
        return _about_infinities(infinite[0], base)
    if base in _DIVISIONS:
        return "0 / 0 is nan: add an eps to the divisor or mask it before the division." + _of_a_root(finding)
    if finding.forward_op:
        return (
            f"the derivative of {finding.forward_op} is not finite there: move the input away from the point "
            "(clamp, eps) before the op; where() after it hides the value but not the gradient."
        )
    if base in _LOGS | _ROOTS:
        return (
            f"{base} of a negative number is nan: clamp its input; a small negative one is rounding of a 0."
        )
    if base in _INVERSES:
        return f"{base} is defined on a bounded range: clamp its input into it."
    if base in _SPREADS or (base == "mean" and any(0 in given.shape for given in finding.inputs)):
        return f"{base} of too few elements is 0 / 0: check the length first, or pass correction=0."
    if base.endswith("norm"):
        return f"{base} divides by a root: the variance is negative, or 0 without eps; look at running_var."
    return f"{base} is not defined for these inputs: look at their ranges above."


def _about_infinities(argument: str, base: str) -> str:
    if base in _SOFTMAXES:
        return (
            "a row with nothing but -inf has no softmax: every position of it is masked. Leave one position "
            "open, or mask with a large negative number and drop the row afterwards."
        )
    return (
        f"{argument} holds infinities, and inf - inf, inf / inf and 0 * inf are nan: keep them out of "
        f"{base}, or mask its input rather than its result, so that the gradient is masked too."
    )


def _of_a_root(finding: Finding) -> str:
    forward = finding.forward_op.partition("::")[2].split(".")[0]
    if forward in _ROOTS:
        return f" It is the derivative of {forward} at 0: add the eps inside, {forward}(x + eps)."
    return ""


def _about_weights(finding: Finding, base: str, largest: float) -> str:
    is_product = base in _PRODUCTS and finding.direction == "forward" and _is_narrow(finding.dtype)
    if not is_product or not LARGE_WEIGHT < largest < math.inf:
        return ""
    return (
        f" The weights of {finding.module} reach {largest:.4g}: if they have grown in this run, it diverges, "
        "and fp32 only delays the nan; lower the learning rate or clip gradients."
    )


def _about_overflow(finding: Finding, base: str, exponent: float | None) -> str:
    dtype = short_name(finding.dtype)
    limit = input_limit(base, finding.limit, exponent)
    largest = max((g.largest for g in finding.inputs if not math.isnan(g.largest)), default=math.nan)
    cause = (
        f"{base} overflows {dtype} above {limit:.4g}" if limit else f"{base} goes beyond {finding.limit:.5g}"
    )
    if base == "_to_copy":
        cause = f"{largest:.5g} is beyond {finding.limit:.5g}, the largest number of {dtype}"
    if finding.direction == "backward" and _is_narrow(finding.dtype):
        has_ways = finding.in_block and (finding.rule_names or finding.cures)
        way = _in_fp32(finding) if has_ways else "look at how large the loss is, and whether it grows"
        return (
            f"{cause}. In {dtype} a loss scale does so while it is too large, and GradScaler halves it: if "
            f"steps are skipped again and again, {way}."
        )
    if not _is_narrow(finding.dtype):
        return f"{cause}: the numbers grow. Lower the learning rate, clip gradients, normalise what goes in."
    if base in _PRODUCTS:
        return (
            f"{cause}: scale before the product, as attention divides q by sqrt(d), or {_in_fp32(finding)}."
        )
    if base in _SUMS:
        return f"{cause}: divide before the sum, or {_in_fp32(finding)}."
    if base == "_to_copy":
        return f"{cause}: keep it in fp32, or {_in_fp32(finding)}."
    return f"{cause}; {_in_fp32(finding)}."


def _in_fp32(finding: Finding) -> str:
    """Say how the op comes to run in fp32."""
    ways = []
    if finding.rule_names:
        ways.append(f"give {' and '.join(finding.rule_names)} the rule fp32")
    if not finding.in_block:
        inside = [f"{way} in an autocast block, of which none is open here" for way in ways]
        return " or ".join([*inside, "call float() on its input"])
    if any("the module" in cure.place for cure in finding.cures):
        ways.append(f"run {finding.module} in fp32")
    return " or ".join(ways) or "call float() on its input in a block with autocast disabled"


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether fp32 has numbers far beyond the dtype's largest; beyond that of bf16 it has hardly any."""
    return torch.finfo(dtype).max < 0.5 * torch.finfo(torch.float32).max


def input_limit(base: str, largest: float, exponent: float | None = None) -> float | None:
    """Return the input above which an op of one input overflows.

    Args:
        base: the op's plain name.
        largest: the largest number of its dtype.
        exponent: of ``pow``.

    Returns:
        None for ops with no such limit.
    """
    if base == "pow":
        return largest ** (1 / exponent) if exponent and exponent > 1 else None
    limits = {
        "cosh": math.log(2) + math.log(largest),
        "exp": math.log(largest),
        "exp2": math.log2(largest),
        "expm1": math.log(largest),
        "sinh": math.log(2) + math.log(largest),
        "square": math.sqrt(largest),
    }
    return limits.get(base)


def _touches_zero(finding: Finding, base: str) -> bool:
    if base == "logit":
        return True
    pole = -1.0 if base == "log1p" else 0.0
    return any(given.lowest <= pole for given in finding.inputs)


def _divides_by_zero(finding: Finding) -> bool:
    """Whether the divisor, the last argument, reaches 0."""
    return any(_reaches_zero(given) for given in finding.inputs[-1:])


def _reaches_zero(given: TensorSummary) -> bool:
    tiny = torch.finfo(given.dtype).smallest_normal if given.dtype.is_floating_point else 0.0
    return given.lowest <= tiny and given.highest >= -tiny
