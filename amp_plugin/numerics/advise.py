"""Why a number is not finite, what to do about it in words, and lines to paste where fp32 is a way out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from amp_plugin.numerics.finding import Cause, Cure, Finding
from amp_plugin.numerics.modules import ModuleAddress
from amp_plugin.numerics.values import TensorSummary
from amp_plugin.precision import short_name

GROWN = 8.0
"""Weights so many times as large as when they were first seen have diverged; see ``Modules.growth``."""

_PRODUCTS = frozenset(
    {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "dot", "linear", "matmul",
     "mkldnn_rnn_layer", "mm", "mv", "vdot"}
)  # fmt: skip
_DIVISIONS = frozenset({"div", "reciprocal", "rsqrt", "true_divide", "addcdiv"})
_LOGS = frozenset({"log", "log10", "log1p", "log2", "logit", "xlogy", "special_xlog1py"})
_ROOTS = frozenset({"linalg_vector_norm", "norm", "pow", "rsqrt", "sqrt", "cdist", "_cdist_forward", "hypot"})
_BOUNDED = frozenset({"acos", "asin", "atanh", "acosh", "erfinv"})
_POLES = frozenset({"digamma", "lgamma", "polygamma", "mvlgamma", "special_zeta", "tan"})
_AVERAGES = frozenset(
    {"std", "var", "std_mean", "var_mean", "mean", "nll_loss_forward", "nll_loss2d_forward"}
)
_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
_SUMS = frozenset({"sum", "mean", "cumsum", "prod", "linalg_vector_norm", "norm", "_cdist_forward", "dist"})
_CAME_IN: dict[str, Cause] = {
    "weight": "weight", "input": "data", "unwritten": "unwritten", "collective": "collective",
    "constant": "constant", "function": "function",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What a finding does not hold of the program around the op.

    Attributes:
        base: the op's plain name, ``"exp"``.
        exponent: of ``pow``, where it is a number.
        growth: by which factor the weights that grew most have grown.
        grown: their path.
        in_optimizer: a step of an optimizer of torch's made it.
        divisor: plain name of the op that made the divisor.
    """

    base: str
    exponent: float | None = None
    growth: float = 1.0
    grown: str = ""
    in_optimizer: bool = False
    divisor: str = ""


def advised(finding: Finding, around: Circumstances, module: ModuleAddress) -> Finding:
    """Return a finding with its cause, what to do, and lines to paste where those cure it.

    Args:
        finding: without them.
        around: what is known of the program.
        module: where the op's module is found.
    """
    finding = replace(finding, cause=_cause(finding, around))
    if finding.cause == "range" and finding.in_block:
        cures = cures_of(module, finding.rule_names, finding.device_type)
        finding = replace(finding, cures=cures)
    return replace(finding, advice=_advice(finding, around))


def _cause(finding: Finding, around: Circumstances) -> Cause:
    """Return why the numbers of a finding are not finite."""
    if finding.kind != "made":
        return _CAME_IN[finding.kind]
    own = _cause_of_nan(finding, around) if finding.values.nan else _cause_of_infinity(finding, around)
    has_diverged = around.growth >= GROWN and finding.moment.optimizer_steps > 0
    if has_diverged and own in {"range", "size", "infinity", "domain", "loss scale"}:
        return "divergence"
    return own


def _cause_of_nan(finding: Finding, around: Circumstances) -> Cause:
    base = around.base
    if _infinite_argument(finding):
        return "mask" if base in _SOFTMAXES else "infinity"
    if around.in_optimizer and _is_narrow(finding.dtype):
        return "range"
    if base in _AVERAGES and (base != "mean" or any(0 in given.shape for given in finding.inputs)):
        return "empty"
    if base in _DIVISIONS and _divides_by_zero(finding):
        return "pole"
    return "pole" if finding.forward_op else "domain"


def _cause_of_infinity(finding: Finding, around: Circumstances) -> Cause:
    base = around.base
    if around.in_optimizer:
        return "range" if _is_narrow(finding.dtype) else "divergence"
    if _is_at_a_pole(finding, around):
        return "pole"
    if finding.direction == "backward" and finding.dtype is torch.float16 and base == "_to_copy":
        return "loss scale"
    return "range" if _is_narrow(finding.dtype) else "size"


def _is_at_a_pole(finding: Finding, around: Circumstances) -> bool:
    """Return whether the op is infinite at a point that its input reaches."""
    base, given = around.base, finding.inputs
    if base in _LOGS:
        pole = -1.0 if base == "log1p" else 0.0
        return base == "logit" or any(argument.lowest <= pole for argument in given)
    if base == "pow" and around.exponent is not None and around.exponent < 0:
        return any(map(_reaches_zero, given))
    if base in _BOUNDED:
        return any(argument.largest >= 1 for argument in given)
    return base in _POLES or (base in _DIVISIONS and _divides_by_zero(finding))


def _advice(finding: Finding, around: Circumstances) -> str:  # noqa: PLR0911 - one answer per cause
    """Return in one or two sentences what to do."""
    match finding.cause:
        case "divergence":
            return _about_divergence(finding, around)
        case "pole":
            return _about_a_pole(finding, around)
        case "domain":
            return _about_a_domain(around.base)
        case "mask":
            return (
                "a row with nothing but -inf has no softmax: every position of it is masked. Leave one "
                "position "
                "open, or mask with a large negative number and drop the row afterwards."
            )
        case "infinity":
            return (
                f"{_infinite_argument(finding)} holds infinities, and inf - inf, inf / inf and 0 * inf "
                "are nan: keep them out of "
                f"{around.base}: put them in with masked_fill or where, after the arithmetic, so that the "
                "gradient "
                "is masked too."
            )
        case "empty":
            return (
                f"{around.base} of too few elements is 0 / 0: check the length first (an empty selection, "
                "targets "
                "that are all ignored), or pass correction=0."
            )
        case "range" | "size" | "loss scale":
            return _about_range(finding, around)
        case _:
            return _about_what_came_in(finding)


def _about_divergence(finding: Finding, around: Circumstances) -> str:
    whose = f"{around.grown} is" if around.grown else "weights are"
    times = "beyond all numbers" if math.isinf(around.growth) else f"{around.growth:.3g} times as large"
    grown = f"{whose} {times} as at the start: " if around.growth > 1 else ""
    delay = "; fp32 would only delay it" if _is_narrow(finding.dtype) else ""
    return f"{grown}the training diverges{delay}. Lower the learning rate, warm it up, or clip gradients."


def _about_a_pole(finding: Finding, around: Circumstances) -> str:
    base, forward = around.base, _plain(finding.forward_op)
    root = (finding.forward_op and forward in _ROOTS) or (around.divisor in _ROOTS)
    if not finding.forward_op and around.divisor in _ROOTS:
        return (
            "0 / 0: the divisor is a root that is 0 there. Multiply by rsqrt(x + eps) of the same x "
            "instead; an eps "
            "next to the root would leave the root's own gradient infinite."
        )
    if finding.forward_op and root:
        return (
            f"it is the derivative of {forward} at 0, which is infinite: put the eps inside, {forward}(x "
            "+ eps), or for "
            "a division by it rsqrt(x + eps). where() afterwards hides the value but not the gradient."
        )
    if finding.forward_op and forward != base:
        return (
            f"the derivative of {forward} is not finite there: move the input away from the point (clamp, "
            "eps) or "
            "mask it before the op; where() after it hides the value but not the gradient."
        )
    if base in _LOGS:
        pole = -1 if base == "log1p" else 0
        return (
            f"{base} of {pole} is infinite: clamp its input or add an eps; log_softmax and logsumexp "
            "need neither."
        )
    if base in _DIVISIONS:
        return f"{base} by 0: add an eps to the divisor, or mask it before the division."
    return f"{base} is infinite at this point: clamp its input away from it, or add an eps."


def _about_a_domain(base: str) -> str:
    if base in _LOGS | _ROOTS:
        return (
            f"{base} of a negative number is nan: clamp its input; a small negative one is a 0 that "
            "was rounded."
        )
    if base in _BOUNDED:
        return f"{base} is defined on a bounded range: clamp its input into it, and away from its ends."
    if base.endswith("norm"):
        return f"{base} divides by a root: the variance is negative, or 0 without eps; look at running_var."
    return f"{base} is not defined for these inputs: clamp them into its range; they are shown above."


def _about_what_came_in(finding: Finding) -> str:
    return {
        "weight": "look at the checkpoint, at how this weight is initialised, and at the last optimizer "
        "step: it was "
        "so before this op read it.",
        "unwritten": "torch.empty and its kin return whatever the memory held: write every element, or use "
        "torch.zeros.",
        "collective": "read the report of the other ranks: the one that made it names the op.",
        "input": "look at the data: it was so before the first op read it. isfinite() in the loader "
        "finds the sample.",
        "constant": "the program wrote this nan or infinity itself: leave those elements out before they "
        "are used; "
        "a mask afterwards hides the value but not the gradient.",
        "function": f"look at what {finding.op} computes outside of torch, in NumPy or in C: it got "
        "finite numbers.",
    }[finding.kind]


def _about_range(finding: Finding, around: Circumstances) -> str:  # noqa: PLR0911 - one answer per op
    base, dtype = around.base, short_name(finding.dtype)
    limit = input_limit(base, finding.limit, around.exponent)
    cause = (
        f"{base} overflows {dtype} above {limit:.4g}" if limit else f"{base} goes beyond {finding.limit:.5g}"
    )
    if base == "_to_copy":
        largest = max((g.largest for g in finding.inputs if not math.isnan(g.largest)), default=math.nan)
        cause = f"{largest:.5g} is beyond {finding.limit:.5g}, the largest number of {dtype}"
    if around.in_optimizer:
        return (
            f"the optimizer computes in {dtype}, where its eps is 0: keep weights and its state in "
            "fp32, or raise eps."
        )
    if finding.direction == "backward" and _is_narrow(finding.dtype):
        has_ways = finding.in_block and (finding.rule_names or finding.cures)
        way = _in_fp32(finding) if has_ways else "look at how large the loss is, and whether it grows"
        return (
            f"{cause}. In {dtype} a loss scale does so while it is too large, and GradScaler halves it: if "
            f"steps are skipped again and again, {way}."
        )
    if finding.cause == "size":
        return (
            f"{cause}: clamp its input, or subtract the largest first, as logsumexp and softmax do; "
            "normalise what goes in."
        )
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
    """Return how the op comes to run in fp32."""
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
    """Return the input above which an op of one input overflows; None for ops with no such limit.

    Args:
        base: the op's plain name.
        largest: the largest number of its dtype.
        exponent: of ``pow``.
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


def _infinite_argument(finding: Finding) -> str:
    """Return the name of an argument that holds an infinity; empty without any."""
    named = [given.name for given in finding.inputs if given.inf]
    return next(iter([*named, *(name for name, number in finding.numbers if math.isinf(number))]), "")


def _divides_by_zero(finding: Finding) -> bool:
    """Return whether the divisor, the last argument, reaches 0."""
    if dict(finding.numbers).get("other") == 0:
        return True
    return any(_reaches_zero(given) for given in finding.inputs[-1:])


def _reaches_zero(given: TensorSummary) -> bool:
    tiny = torch.finfo(given.dtype).smallest_normal if given.dtype.is_floating_point else 0.0
    return given.lowest <= tiny and given.highest >= -tiny


def _plain(op: str) -> str:
    return op.partition("::")[2].split(".")[0].strip("_")


# -- lines to paste ------------------------------------------------------------------------------------------


def cures_of(
    module: ModuleAddress, rule_names: Sequence[str], device_type: str, loaded: Container[str] = sys.modules
) -> tuple[Cure, ...]:
    """Return the ways to compute an op in fp32, as the program's front door takes them.

    Args:
        module: in which the op ran; for the outermost one there is none: nothing would stay in 16 bits.
        rule_names: the ops to give the rule fp32, as ``OpRules.with_rule`` takes them.
        device_type: of the tensors that the op made: ``"cpu"``, ``"cuda"``, ...
        loaded: modules; which adapters are among them says how the program takes options.
    """
    if "amp_plugin.adapters.lightning" in loaded:
        return tuple(_of_lightning(module, rule_names, device_type))
    if "amp_plugin.adapters.accelerate" in loaded:
        is_launched = "transformers.trainer" in loaded or "ACCELERATE_MIXED_PRECISION" in os.environ
        return tuple((_of_environment if is_launched else _of_accelerate)(module, rule_names, device_type))
    return tuple(_of_plain(module, rule_names, device_type))


def _rules(names: Sequence[str], device_type: str) -> str:
    changes = "".join(f'.with_rule("{name}", "fp32")' for name in names)
    return f'amp_plugin.OpRules.default("{device_type}"){changes}'


def _everywhere(names: Sequence[str], place: str) -> str:
    return f"{' and '.join(names)} in fp32, in all modules: {place}"


def _of_plain(module: ModuleAddress, names: Sequence[str], device_type: str) -> Iterator[Cure]:
    if module.path:
        yield Cure(
            place=f"the module in fp32: after the line that makes the model; model is your {module.model}",
            code="import amp_plugin, torch\n"
            f'amp_plugin.run_in(torch.float32)(model.get_submodule("{module.path}"))',
        )
    if names:
        yield Cure(
            place=_everywhere(names, "once, before the training begins"),
            code=f"import amp_plugin\namp_plugin.set_default_rules({_rules(names, device_type)})",
        )


def _of_lightning(module: ModuleAddress, names: Sequence[str], device_type: str) -> Iterator[Cure]:
    """Options of the plugin that the program has made already: it keeps the others."""
    place = "Lightning, options of the plugin (in Fabric FabricAmpPrecision), next to those it has"
    call = f"import amp_plugin\namp_plugin.AmpPrecision({_own_options()}"
    if module.path:
        pattern = module.path if module.is_of_lightning else f"*.{module.path}"
        yield Cure(place=f"the module in fp32: {place}", code=f'{call}fp32_modules=["{pattern}"])')
    if names:
        yield Cure(place=_everywhere(names, place), code=f"{call}rules={_rules(names, device_type)})")


def _own_options() -> str:
    """Return the beginning of a plugin's call: its precision."""
    return '"fp16", '


def _of_accelerate(module: ModuleAddress, names: Sequence[str], device_type: str) -> Iterator[Cure]:
    place = "Accelerate, an option in kwargs_handlers, next to those it has"
    call = "import amp_plugin\namp_plugin.AmpKwargs("
    if module.path:
        yield Cure(place=f"the module in fp32: {place}", code=f'{call}fp32_modules=["{module.path}"])')
    if names:
        yield Cure(place=_everywhere(names, place), code=f"{call}rules={_rules(names, device_type)})")


def _of_environment(module: ModuleAddress, names: Sequence[str], device_type: str) -> Iterator[Cure]:
    """Return lines for the shell: transformers.Trainer and launched programs make their own Accelerator."""
    if module.path:
        yield Cure(
            place="the module in fp32: in the shell, before the program is started",
            code=f"export AMP_PLUGIN_FP32_MODULES='{module.path}'",
        )
    if names:
        entries = "".join(f"\\n  {name}: fp32" for name in names)
        yield Cure(
            place=_everywhere(names, "in the shell, before the program is started"),
            code=f"printf 'device_type: {device_type}\\nrules:{entries}\\n' > rules.yaml\n"
            "export AMP_PLUGIN_RULES=rules.yaml",
        )
