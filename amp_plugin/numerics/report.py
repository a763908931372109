"""Describe a call of an op as a finding."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from amp_plugin.numerics.advise import advised
from amp_plugin.numerics.cures import callers_of
from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Argument, Call
from amp_plugin.numerics.places import Site
from amp_plugin.numerics.values import Held, TensorSummary, summarise

_TRANSPARENT = ("Add", "Clamp", "Expand", "Unsqueeze", "View", "Reshape", "Broadcast", "Maximum")
_VIEWS = ("View", "Expand", "Unsqueeze", "Transpose", "TBackward")


def finding_of(
    tracker: Tracker,
    call: Call,
    kind: Kind,
    result: Tensor,
    held: Held,
    read: Argument | None = None,
    made: Site | None = None,
    *,
    source: str = "",
) -> Finding:
    """Describe an origin that a call made, or was the first to read from an argument."""
    op = made.op if made else call.traits.name
    forward_op = call.forward_op if call.is_backward and not made else ""
    inputs = tuple(_summary(tracker, call, given) for given in ([read] if read else call.arguments))
    row = f"row {inputs[0].first[0]}" if kind == "input" and len(inputs[0].first) > 1 else ""
    growth, grown = tracker.growth()
    finding = described(
        tracker,
        made or call.site,
        result,
        kind=kind,
        held=held,
        op=function_of(read.tensor) if kind == "function" and read else op,
        forward_op=forward_op,
        inputs=inputs,
        numbers=tuple(call.numbers.items()),
        rule_names=callers_of(forward_op or op, is_transposed=call.named.get("transposed") is True),
        source=", ".join(filter(None, (source, row))),
    )
    return advised(
        finding,
        tracker.address(finding.module),
        base=call.traits.base,
        growth=growth,
        grown=grown,
        in_optimizer=tracker.in_step,
        divisor=_maker(call.arguments[-1].tensor) if call.arguments and not forward_op else "",
    )


def described(tracker: Tracker, site: Site, result: Tensor, **known: Any) -> Finding:
    """Return a finding of a result at a site, without its cause."""
    return Finding(
        module=site.module,
        place=site.place,
        caller=site.caller,
        in_block=site.in_block,
        direction="backward" if known["forward_op"] else "forward",
        dtype=result.dtype,
        output=summarise(result),
        device_type=result.device.type,
        moment=tracker.now(in_backward=torch._C._current_autograd_node() is not None),
        **known,
    )


def _summary(tracker: Tracker, call: Call, argument: Argument) -> TensorSummary:
    name = tracker.weight(argument.tensor)
    written = " (now)" if argument.name in call.traits.written else ""
    return summarise(argument.tensor, (name or argument.label) + written)


def function_of(tensor: Tensor) -> str:
    """Return the name of the user's autograd function that made a tensor; empty if none did."""
    node = tensor.grad_fn
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        is_view = any(name in node.name() for name in _VIEWS) and node.next_functions
        node = node.next_functions[0][0] if is_view else None
    return node.name().removesuffix("Backward") if node is not None else ""


def _maker(tensor: Tensor) -> str:
    """Return the plain name of the op that made a tensor, sums with an eps and changes of shape left out."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_TRANSPARENT) and node.next_functions:
        node = next((source for source, _ in node.next_functions if source is not None), None)
    name = "" if node is None else node.name().rstrip("0123456789").removesuffix("Backward")
    return "linalg_vector_norm" if name == "LinalgVectorNorm" else name.lower()


def pattern_of(path: str) -> str:
    """Return a module's path as a pattern that its siblings match: ``"Net.layers.*.attention"``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)
