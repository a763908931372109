"""The autocast rule of an op, asked while it runs below autocast, and the names by which rules reach it."""

from __future__ import annotations

from amp_plugin.casting.dispatcher import DEVICE_NUMBERS, KERNELS, rules_of
from amp_plugin.casting.op_names import names_an_op
from amp_plugin.casting.rules import OpRules
from amp_plugin.casting.rules_files import TABLES

# What runs -> the ops by which a program may have called it. Autocast looks at the outermost one.
_CALLED_AS = {
    "addmm": ("linear", "addmm"),
    "baddbmm": ("baddbmm",),
    "bmm": ("matmul", "bmm"),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "convolution transposed": ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "dot": ("matmul", "dot"),
    "linalg_vector_norm": ("norm", "linalg_vector_norm"),
    "mm": ("linear", "matmul", "mm"),
    "mv": ("matmul", "mv"),
}

# The same where there is one other name.
_MADE_OF = {
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math": "scaled_dot_product_attention",
    "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss2d",
    "linalg_vector_norm": "norm",
}


def autocast_name(op: str) -> str:
    """Return the name by which a rule reaches an op, without overload.

    Args:
        op: full name of what ran, ``"aten::_softmax.default"``.

    Returns:
        ``"aten::softmax"``; the op's own name without overload for most.
    """
    namespace, _, rest = op.partition("::")
    packet = rest.split(".")[0]
    return f"{namespace}::{_MADE_OF.get(packet, packet.rstrip('_'))}"


def callers_of(op: str, *, is_transposed: bool = False) -> tuple[str, ...]:
    """Return the names to give a rule to, so that it reaches an op however the program called it.

    Args:
        op: full name of what ran, ``"aten::bmm.default"``.
        is_transposed: it is a transposed convolution, which runs under the name of any other.

    Returns:
        ``("aten::matmul", "aten::bmm")``; the op's own name without overload for most. None for casts, for
        in-place forms, which keep the dtype of what they write into, and for autograd functions.
    """
    namespace, _, rest = op.partition("::")
    packet = rest.split(".")[0]
    if packet.endswith("_") or packet == "_to_copy":
        return ()
    called_as = _CALLED_AS.get(f"{packet} transposed" if is_transposed else packet, ())
    names = tuple(f"{namespace}::{name}" for name in called_as) or (autocast_name(op),)
    return tuple(name for name in names if names_an_op(name))


def rule_of(op: str, device_type: str, *, is_transposed: bool = False) -> str:
    """Return the rule that autocast has for an op: the open region's, else the default one.

    Args:
        op: full name of what ran; one that no program calls so has the rules of those it may be called as.
        device_type: ``"cpu"``, ``"cuda"``, ...
        is_transposed: as for :func:`callers_of`.

    Returns:
        A value of OpRule; ``"unchanged"`` too where no autocast is known for the device.
    """
    if device_type not in TABLES:
        return "unchanged"
    rules = _rules(device_type).rules
    if op in rules:
        return rules[op].value
    name, callers = autocast_name(op), callers_of(op, is_transposed=is_transposed)
    names = {name} if name in callers else {name, *callers}
    found = {rule.value for known, rule in rules.items() if known.split(".")[0] in names}
    return ", ".join(sorted(found)) or "unchanged"


def _rules(device_type: str) -> OpRules:
    """Return the rules of this thread's innermost region on a device."""
    for device, number, _ in KERNELS.innermost_regions():
        if device == DEVICE_NUMBERS[device_type]:
            return rules_of(number) or OpRules.default(device_type)
    return OpRules.default(device_type)
