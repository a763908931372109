"""Why a number is not finite, and what to do about it: the first row of a table that holds says both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

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

# Cause, and which case of it -> what to do; c is the case.
_ADVICE = {
    "weight": "look at the checkpoint, at how it is initialised, and at the last step: it was so before.",
    "data": "look at the data: it was so before the first op read it; isfinite() in the loader finds it. If "
    "it is meant, replace it first: a mask or where() afterwards hides no gradient.",
    "unwritten": "torch.empty returns whatever the memory held: write every element, or use torch.zeros.",
    "collective": "read the report of the other ranks: the one that made it names the op.",
    "constant": "this nan was written, by the program or by a function of torch's in this line (logdet of a "
    "negative determinant): leave those elements out before; a mask hides no gradient of them.",
    "function": "look at what {c.finding.op} computes outside of torch, in NumPy or in C: it got finite "
    "numbers.",
    "mask": "a row with nothing but -inf has no softmax: every position of it is masked. Leave one position "
    "open, or mask with a large negative number and drop the row afterwards.",
    "infinity": "{c.infinite} holds infinities, and inf - inf, inf / inf and 0 * inf are nan: keep them out "
    "of {c.base}: put them in by masked_fill or where after the arithmetic, so that the gradient is masked "
    "too.",
    "empty": "{c.base} of too few elements is 0 / 0: check the length first (an empty selection, targets "
    "that are all ignored), or pass correction=0.",
    "divergence": "{c.growing}. Lower the learning rate, warm it up, or clip gradients.",
    "pole, of a root": "0 / 0: the divisor is a root that is 0 there. Multiply by rsqrt(x + eps) of the same "
    "x instead; an eps next to the root would leave the root's own gradient infinite.",
    "pole, derivative of a root": "it is the derivative of {c.forward} at 0, which is infinite: put the eps "
    "inside, {c.forward}(x + eps), or for a division by it rsqrt(x + eps). where() afterwards hides the "
    "value but not the gradient.",
    "pole, eigenvalues": "the derivative of {c.forward} divides by the differences of eigenvalues, and some "
    "are equal: an eps on the diagonal keeps them so. Use cholesky, or what needs no single eigenvectors.",
    "pole, derivative": "the derivative of {c.forward} is not finite there: move the input away from the "
    "point (clamp, eps) or mask it before the op; where() after it hides the value but not the gradient.",
    "pole, log": "{c.base} of {c.pole} is infinite: clamp its input, add an eps, or call log_softmax or "
    "logsumexp.",
    "pole, own division": "in {c.finding.forward_op}, which the program wrote itself, {c.base} by 0: add an "
    "eps to the divisor, or mask it before the division.",
    "pole, division": "{c.base} by 0: add an eps to the divisor, or mask it before the division.",
    "pole": "{c.base} is infinite at this point: clamp its input away from it, or add an eps.",
    "domain, length": "an input is shorter than its target: leave it out, or pass zero_infinity=True.",
    "domain, negative": "{c.base} of a negative number is nan: clamp its input; a small one is a 0 that was "
    "rounded.",
    "domain, bounded": "{c.base} is defined on a bounded range: clamp its input into it, and away from its "
    "ends.",
    "domain, norm": "{c.base} divides by a root: the variance is negative, or 0 without eps; look at "
    "running_var.",
    "domain": "{c.base} is not defined for these inputs: clamp them into its range; they are shown above.",
    "loss scale": "{c.overflow}. In {c.dtype} a loss scale that is still too large has this effect, and "
    "GradScaler halves it: if steps are skipped again and again, {c.in_fp32_if_known}.",
    "range, optimizer": "the optimizer computes in {c.dtype}, where its eps is 0: keep weights and its state "
    "in fp32, or raise eps.",
    "range, product": "{c.overflow}: scale before the product, as attention divides q by sqrt(d), or "
    "{c.in_fp32}.",
    "range, sum": "{c.overflow}: divide before the sum, or {c.in_fp32}.",
    "range, cast": "{c.overflow}: keep it in fp32, or {c.in_fp32}.",
    "range": "{c.overflow}; {c.in_fp32}.",
    "size, sum": "{c.overflow}: what goes in has grown: look for a recurrence with weights above 1, step "
    "after step, and for weights that are large from the start; normalise, or initialise them smaller.",
    "size": "{c.overflow}: clamp its input, or subtract the largest first, as logsumexp and softmax do; "
    "normalise what goes in.",
}
_ADVICE["range, backward"] = _ADVICE["loss scale"]


def _rows(c: _Case) -> Iterator[tuple[object, str]]:
    """Yield whether a row holds for numbers that an op made, and the key of its cause and advice."""
    yield c.nan and c.infinite and c.base in SOFTMAXES, "mask"
    yield c.nan and c.infinite, "infinity"
    yield c.in_optimizer and c.is_narrow, "range, optimizer"
    yield c.in_optimizer and not c.nan, "divergence"
    yield c.nan and (c.base in _AVERAGES or (c.base == "mean" and c.reads_nothing)), "empty"
    if c.is_at_pole:
        yield c.divisor in _ROOTS and not c.forward, "pole, of a root"
        yield c.forward in _ROOTS, "pole, derivative of a root"
        yield "eig" in c.forward or "svd" in c.forward, "pole, eigenvalues"
        yield c.forward not in {"", c.base}, "pole, derivative"
        yield c.base in _LOGS, "pole, log"
        yield c.base in _DIVISIONS and c.finding.forward_op and not c.forward, "pole, own division"
        yield c.base in _DIVISIONS, "pole, division"
        yield True, "pole"
    yield c.base == "_ctc_loss", "domain, length"
    yield c.nan and c.base in _LOGS | _ROOTS, "domain, negative"
    yield c.nan and c.base in _BOUNDED, "domain, bounded"
    yield c.nan and c.base.endswith("norm"), "domain, norm"
    yield c.nan, "domain"
    if c.is_narrow:
        is_backward = c.finding.direction == "backward"
        yield is_backward and c.finding.dtype is torch.float16 and c.base == "_to_copy", "loss scale"
        yield is_backward, "range, backward"
        yield c.base in _PRODUCTS, "range, product"
        yield c.base in _SUMS, "range, sum"
        yield c.base == "_to_copy", "range, cast"
        yield True, "range"
    yield c.base in _PRODUCTS | _SUMS, "size, sum"
    yield True, "size"


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A finding without its cause, and what it does not hold of the program around the op."""

    finding: Finding
    base: str  # the op's plain name, "exp"
    growth: float = 1.0  # by which factor the weights that grew most have grown
    grown: str = ""  # their path
    in_optimizer: bool = False  # a step of an optimizer of torch's made it
    divisor: str = ""  # plain name of the op that made the divisor

    # -- what rows ask -------------------------------------------------------------------------------------

    @property
    def nan(self) -> bool:
        return self.finding.values.nan

    @property
    def is_narrow(self) -> bool:
        """Whether fp32 has numbers far beyond the dtype's largest; beyond that of bf16 it has hardly any."""
        return self.finding.limit < 0.5 * torch.finfo(torch.float32).max

    @property
    def infinite(self) -> str:
        """The name of an argument that holds an infinity; empty without any."""
        named = [given.name for given in self.finding.inputs if given.inf]
        return next(iter([*named, *(name for name, n in self.finding.numbers if math.isinf(n))]), "")

    @property
    def reads_nothing(self) -> bool:
        return any(0 in given.shape for given in self.finding.inputs)

    @property
    def is_at_pole(self) -> bool:
        """Whether the op, or its forward op's derivative, is infinite at a point that its input reaches."""
        base, given, numbers = self.base, self.finding.inputs, dict(self.finding.numbers)
        if base in _DIVISIONS and (numbers.get("other") == 0 or any(map(_reaches_zero, given[-1:]))):
            return True
        if self.nan:
            return bool(self.finding.forward_op)
        if base in _LOGS:
            return base == "logit" or any(argument.lowest <= self.pole for argument in given)
        if base == "pow" and numbers.get("exponent", 0) < 0:
            return any(map(_reaches_zero, given))
        return base in _POLES or (base in _BOUNDED and any(argument.largest >= 1 for argument in given))

    # -- what advice shows ---------------------------------------------------------------------------------

    @property
    def forward(self) -> str:
        """The plain name of the forward op of a backward op; empty for a function of the program's."""
        return self.finding.forward_op.partition("::")[2].split(".")[0].strip("_")

    @property
    def pole(self) -> int:
        return -1 if self.base == "log1p" else 0

    @property
    def dtype(self) -> str:
        return short_name(self.finding.dtype)

    @property
    def growing(self) -> str:
        whose = f"{self.grown} is" if self.grown else "weights are"
        times = "beyond all numbers" if math.isinf(self.growth) else f"{self.growth:.3g} times as large"
        grown = f"{whose} {times} as at the start: " if self.growth >= _GROWN else ""
        return f"{grown}the training diverges{'; fp32 would only delay it' if self.is_narrow else ''}"

    @property
    def overflow(self) -> str:
        """What overflowed, with the input from which on the op does, if it has one input."""
        base, largest, exponent = self.base, self.finding.limit, dict(self.finding.numbers).get("exponent", 0)
        if base == "_to_copy":
            sizes = [given.largest for given in self.finding.inputs if not math.isnan(given.largest)]
            beyond = f"{max(sizes, default=math.nan):.5g} is beyond {largest:.5g}"
            return f"{beyond}, the largest number of {self.dtype}"
        limit = {
            "cosh": math.log(2) + math.log(largest),
            "exp": math.log(largest),
            "exp2": math.log2(largest),
            "expm1": math.log(largest),
            "pow": largest ** (1 / exponent) if exponent > 1 else None,
            "sinh": math.log(2) + math.log(largest),
            "square": math.sqrt(largest),
        }.get(base)
        does = f"overflows {self.dtype} above {limit:.4g}" if limit else f"goes beyond {largest:.5g}"
        return f"{base} {does}"

    @property
    def in_fp32(self) -> str:
        """How the op comes to run in fp32."""
        finding = self.finding
        ways = [f"give {' and '.join(finding.rule_names)} the rule fp32"] if finding.rule_names else []
        if not finding.in_block:
            inside = [f"{way} in an autocast block, of which none is open here" for way in ways]
            return " or ".join([*inside, "call float() on its input"])
        if any("the module" in cure.place for cure in finding.cures):
            ways.append(f"run {finding.module} in fp32")
        return " or ".join(ways) or "call float() on its input in a block with autocast disabled"

    @property
    def in_fp32_if_known(self) -> str:
        has_ways = self.finding.in_block and (self.finding.rule_names or self.finding.cures)
        return self.in_fp32 if has_ways else "look at how large the loss is, and whether it grows"


def _is_in_fp16(finding: Finding) -> bool:
    dtypes = {finding.dtype, *(given.dtype for given in finding.inputs)}
    block = torch.get_autocast_dtype(finding.device_type) if finding.in_block else None
    return torch.float16 in {*dtypes, block}


def _reaches_zero(given: TensorSummary) -> bool:
    tiny = torch.finfo(given.dtype).smallest_normal
    return given.lowest <= tiny and given.highest >= -tiny


def advised(finding: Finding, module: ModuleAddress, **around: Any) -> Finding:
    """Return a finding with its cause, what to do, and lines to paste where those cure it.

    Args:
        finding: without these.
        module: in which the op ran.
        around: the other fields of a case.
    """
    case = _Case(finding=finding, **around)
    key: str = "data" if finding.kind == "input" else finding.kind
    if finding.kind == "made":
        key = next(key for holds, key in _rows(case) if holds)
        has_diverged = case.growth >= _GROWN and finding.moment.optimizer_steps > 0
        if has_diverged and not key.startswith(("mask", "empty", "pole")):
            key = "divergence"
    cause = cast("Cause", key.partition(",")[0])
    if cause == "range" and finding.in_block:
        finding = replace(finding, cures=cures_of(module, finding.rule_names, finding.device_type))
    advice = _ADVICE[key].format(c=replace(case, finding=finding))
    if cause == "pole" and _is_in_fp16(finding):
        advice += " In fp16 an eps below 6e-8 is 0: take a larger one, or call float() first."
    return replace(finding, cause=cause, advice=advice)
