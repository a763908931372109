"""Why a number is not finite, and what to do about it in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from amp_plugin.numerics.cures import cures_of
from amp_plugin.numerics.finding import Cause, Finding
from amp_plugin.numerics.modules import ModuleAddress
from amp_plugin.numerics.values import TensorSummary
from amp_plugin.precision import short_name

_GROWN = 8.0  # weights so many times as large as when they were first seen have diverged

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
_SUMS = frozenset({"sum", "mean", "cumsum", "prod", "linalg_vector_norm", "norm", "_cdist_forward", "dist"})
SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})

_ADVICE: dict[Cause, str] = {
    "weight": "look at the checkpoint, at how it is initialised, and at the last step: it was so before.",
    "data": "look at the data: it was so before the first op read it; isfinite() in the loader finds it. If "
    "it is meant, replace it first: a mask or where() afterwards hides no gradient.",
    "unwritten": "torch.empty returns whatever the memory held: write every element, or use torch.zeros.",
    "collective": "read the report of the other ranks: the one that made it names the op.",
    "constant": "this nan was written, by the program or by a function of torch's in this line (logdet of a "
    "negative determinant): leave those elements out before; a mask hides no gradient of them.",
    "function": "look at what {op} computes outside of torch, in NumPy or in C: it got finite numbers.",
    "mask": "a row with nothing but -inf has no softmax: every position of it is masked. Leave one position "
    "open, or mask with a large negative number and drop the row afterwards.",
    "infinity": "{infinite} holds infinities, and inf - inf, inf / inf and 0 * inf are nan: keep them out of "
    "{base}: put them in by masked_fill or where after the arithmetic, so that the gradient is masked too.",
    "empty": "{base} of too few elements is 0 / 0: check the length first (an empty selection, targets that "
    "are all ignored), or pass correction=0.",
}

_AT_A_POLE = {
    "divisor": "0 / 0: the divisor is a root that is 0 there. Multiply by rsqrt(x + eps) of the same x "
    "instead; an eps next to the root would leave the root's own gradient infinite.",
    "root": "it is the derivative of {forward} at 0, which is infinite: put the eps inside, {forward}(x + "
    "eps), or for a division by it rsqrt(x + eps). where() afterwards hides the value but not the gradient.",
    "eigenvalues": "the derivative of {forward} divides by the differences of eigenvalues, and some are "
    "equal: an eps on the diagonal keeps them so. Use cholesky, or what needs no single eigenvectors.",
    "derivative": "the derivative of {forward} is not finite there: move the input away from the point "
    "(clamp, eps) or mask it before the op; where() after it hides the value but not the gradient.",
    "log": "{base} of {pole} is infinite: clamp its input, add an eps, or call log_softmax or logsumexp.",
    "division": "{own}{base} by 0: add an eps to the divisor, or mask it before the division.",
    "point": "{base} is infinite at this point: clamp its input away from it, or add an eps.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a finding does not hold of the program around the op."""

    base: str  # the op's plain name, "exp"
    growth: float = 1.0  # by which factor the weights that grew most have grown
    grown: str = ""  # their path
    in_optimizer: bool = False  # a step of an optimizer of torch's made it
    divisor: str = ""  # plain name of the op that made the divisor


def advised(finding: Finding, around: Circumstances, module: ModuleAddress) -> Finding:
    """Return a finding with its cause, what to do, and lines to paste where those cure it."""
    finding = replace(finding, cause=_cause(finding, around))
    if finding.cause == "range" and finding.in_block:
        finding = replace(finding, cures=cures_of(module, finding.rule_names, finding.device_type))
    return replace(finding, advice=_advice(finding, around))


# -- why -----------------------------------------------------------------------------------------------------


def _cause(finding: Finding, around: Circumstances) -> Cause:
    """Return why the numbers of a finding are not finite."""
    if finding.kind != "made":
        return "data" if finding.kind == "input" else cast("Cause", finding.kind)
    own = _cause_of_nan(finding, around) if finding.values.nan else _cause_of_infinity(finding, around)
    has_diverged = around.growth >= _GROWN and finding.moment.optimizer_steps > 0
    if has_diverged and own in {"range", "size", "infinity", "domain", "loss scale"}:
        return "divergence"
    return own


def _cause_of_nan(finding: Finding, around: Circumstances) -> Cause:
    base = around.base
    if _infinite_argument(finding):
        return "mask" if base in SOFTMAXES else "infinity"
    if around.in_optimizer and _is_narrow(finding.dtype):
        return "range"
    if base in _AVERAGES or (base == "mean" and any(0 in given.shape for given in finding.inputs)):
        return "empty"
    if base in _DIVISIONS and _divides_by_zero(finding):
        return "pole"
    return "pole" if finding.forward_op else "domain"


def _cause_of_infinity(finding: Finding, around: Circumstances) -> Cause:
    if around.in_optimizer:
        return "range" if _is_narrow(finding.dtype) else "divergence"
    if _is_at_a_pole(finding, around.base):
        return "pole"
    if finding.direction == "backward" and finding.dtype is torch.float16 and around.base == "_to_copy":
        return "loss scale"
    if around.base == "_ctc_loss":
        return "domain"
    return "range" if _is_narrow(finding.dtype) else "size"


def _is_at_a_pole(finding: Finding, base: str) -> bool:
    """Return whether the op is infinite at a point that its input reaches."""
    given = finding.inputs
    if base in _LOGS:
        pole = -1.0 if base == "log1p" else 0.0
        return base == "logit" or any(argument.lowest <= pole for argument in given)
    if base == "pow" and dict(finding.numbers).get("exponent", 0) < 0:
        return any(map(_reaches_zero, given))
    if base in _BOUNDED:
        return any(argument.largest >= 1 for argument in given)
    return base in _POLES or (base in _DIVISIONS and _divides_by_zero(finding))


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether fp32 has numbers far beyond the dtype's largest; beyond that of bf16 it has hardly any."""
    return torch.finfo(dtype).max < 0.5 * torch.finfo(torch.float32).max


def _infinite_argument(finding: Finding) -> str:
    """Return the name of an argument that holds an infinity; empty without any."""
    named = [given.name for given in finding.inputs if given.inf]
    return next(iter([*named, *(name for name, number in finding.numbers if math.isinf(number))]), "")


def _divides_by_zero(finding: Finding) -> bool:
    """Return whether the divisor, the last argument, reaches 0."""
    return dict(finding.numbers).get("other") == 0 or any(map(_reaches_zero, finding.inputs[-1:]))


def _reaches_zero(given: TensorSummary) -> bool:
    tiny = torch.finfo(given.dtype).smallest_normal
    return given.lowest <= tiny and given.highest >= -tiny


# -- what to do ----------------------------------------------------------------------------------------------


def _advice(finding: Finding, around: Circumstances) -> str:
    """Return in one or two sentences what to do."""
    match finding.cause:
        case "divergence":
            return _about_divergence(finding, around)
        case "pole":
            return _about_a_pole(finding, around)
        case "domain":
            return _about_a_domain(around.base)
        case "range" | "size" | "loss scale":
            return _about_range(finding, around)
        case cause:
            infinite = _infinite_argument(finding)
            return _ADVICE[cause].format(op=finding.op, base=around.base, infinite=infinite)


def _about_divergence(finding: Finding, around: Circumstances) -> str:
    whose = f"{around.grown} is" if around.grown else "weights are"
    times = "beyond all numbers" if math.isinf(around.growth) else f"{around.growth:.3g} times as large"
    grown = f"{whose} {times} as at the start: " if around.growth >= _GROWN else ""
    delay = "; fp32 would only delay it" if _is_narrow(finding.dtype) else ""
    return f"{grown}the training diverges{delay}. Lower the learning rate, warm it up, or clip gradients."


def _about_a_pole(finding: Finding, around: Circumstances) -> str:
    base = around.base
    namespace, _, rest = finding.forward_op.partition("::")
    forward = rest.split(".")[0].strip("_")
    own = f"in {namespace}, which the program wrote itself, " if namespace and not rest else ""
    rows = (
        ("divisor", around.divisor in _ROOTS and not forward),
        ("root", forward in _ROOTS),
        ("eigenvalues", "eig" in forward or "svd" in forward),
        ("derivative", forward and forward != base),
        ("log", base in _LOGS),
        ("division", base in _DIVISIONS),
        ("point", True),
    )
    kind = next(name for name, holds in rows if holds)
    return _AT_A_POLE[kind].format(forward=forward, base=base, own=own, pole=-1 if base == "log1p" else 0)


def _about_a_domain(base: str) -> str:
    if base == "_ctc_loss":
        return "an input is shorter than its target: leave it out, or pass zero_infinity=True."
    if base in _LOGS | _ROOTS:
        return f"{base} of a negative number is nan: clamp its input; a small one is a 0 that was rounded."
    if base in _BOUNDED:
        return f"{base} is defined on a bounded range: clamp its input into it, and away from its ends."
    if base.endswith("norm"):
        return f"{base} divides by a root: the variance is negative, or 0 without eps; look at running_var."
    return f"{base} is not defined for these inputs: clamp them into its range; they are shown above."


def _about_range(finding: Finding, around: Circumstances) -> str:
    base, dtype = around.base, short_name(finding.dtype)
    if around.in_optimizer:
        return (
            f"the optimizer computes in {dtype}, where its eps is 0: keep weights and its state in fp32, or "
            "raise eps."
        )
    what = _overflow(finding, base, dtype)
    if finding.direction == "backward" and _is_narrow(finding.dtype):
        has_ways = finding.in_block and (finding.rule_names or finding.cures)
        way = _in_fp32(finding) if has_ways else "look at how large the loss is, and whether it grows"
        return (
            f"{what}. In {dtype} a loss scale does so while it is too large, and GradScaler halves it: if "
            f"steps are skipped again and again, {way}."
        )
    if finding.cause == "size" and base in _PRODUCTS | _SUMS:
        return (
            f"{what}: what goes in has grown: look for a recurrence with weights above 1, step after step, "
            "and for weights that are large from the start; normalise, or initialise them smaller."
        )
    if finding.cause == "size":
        return (
            f"{what}: clamp its input, or subtract the largest first, as logsumexp and softmax do; normalise "
            "what goes in."
        )
    way = ";"
    if base in _PRODUCTS:
        way = ": scale before the product, as attention divides q by sqrt(d), or"
    elif base in _SUMS:
        way = ": divide before the sum, or"
    elif base == "_to_copy":
        way = ": keep it in fp32, or"
    return f"{what}{way} {_in_fp32(finding)}."


def _overflow(finding: Finding, base: str, dtype: str) -> str:
    """Return what overflowed, with the input from which on the op does, if it has one input."""
    largest, exponent = finding.limit, dict(finding.numbers).get("exponent", 0)
    if base == "_to_copy":
        given = max((g.largest for g in finding.inputs if not math.isnan(g.largest)), default=math.nan)
        return f"{given:.5g} is beyond {largest:.5g}, the largest number of {dtype}"
    limit = {
        "cosh": math.log(2) + math.log(largest),
        "exp": math.log(largest),
        "exp2": math.log2(largest),
        "expm1": math.log(largest),
        "pow": largest ** (1 / exponent) if exponent > 1 else None,
        "sinh": math.log(2) + math.log(largest),
        "square": math.sqrt(largest),
    }.get(base)
    return f"{base} overflows {dtype} above {limit:.4g}" if limit else f"{base} goes beyond {largest:.5g}"


def _in_fp32(finding: Finding) -> str:
    """Return how the op comes to run in fp32."""
    ways = [f"give {' and '.join(finding.rule_names)} the rule fp32"] if finding.rule_names else []
    if not finding.in_block:
        inside = [f"{way} in an autocast block, of which none is open here" for way in ways]
        return " or ".join([*inside, "call float() on its input"])
    if any("the module" in cure.place for cure in finding.cures):
        ways.append(f"run {finding.module} in fp32")
    return " or ".join(ways) or "call float() on its input in a block with autocast disabled"
