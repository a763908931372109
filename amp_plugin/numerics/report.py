"""Describe a call of an op as a finding, and fold what is alike in modules alike."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from amp_plugin.numerics.advise import GROWN, Circumstances, advised
from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.modules import Modules, Progress
from amp_plugin.numerics.op import Argument, Call
from amp_plugin.numerics.op_rules import callers_of, rule_of
from amp_plugin.numerics.places import Site
from amp_plugin.numerics.values import NonFinite, Storages, TensorSummary, non_finite, summarise

_TRANSPARENT = ("Add", "Clamp", "Expand", "Unsqueeze", "View", "Reshape", "Broadcast", "Maximum")


def rank_of_process() -> int | None:
    """Return the rank in the process group, or the launcher's; None where there is one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else None


class Reporter:
    """Put together what is known of a call.

    Args:
        modules: knows which module runs.
        progress: knows which pass runs.
        sources: where the tensors of a batch were loaded.
    """

    def __init__(self, modules: Modules, progress: Progress, sources: Storages[str]) -> None:
        self.progress = progress
        self._modules, self._sources = modules, sources

    def finding(
        self,
        call: Call,
        kind: Kind,
        result: Tensor,
        values: NonFinite,
        read: Argument | None = None,
        made: Site | None = None,
        *,
        source: str = "",
    ) -> Finding:
        """Describe an origin that a call made, or was the first to read from an argument."""
        site = made or call.site
        in_backward = made is None and call.is_backward
        op = made.op if made else call.traits.name
        op = self.function(read.tensor) if kind == "function" and read else op
        forward_op = call.forward_op if in_backward else ""
        inputs = tuple(self._summary(call, given) for given in ([read] if read else call.arguments))
        finding = Finding(
            kind=kind,
            op=op,
            direction="backward" if in_backward else "forward",
            forward_op=forward_op,
            values=values,
            module=site.module,
            place=site.where.place,
            caller=site.where.caller,
            dtype=result.dtype,
            limit=torch.finfo(result.dtype).max,
            rule=rule_of(call.traits.name, result.device.type, is_transposed=call.is_transposed),
            output=summarise(result),
            inputs=inputs,
            numbers=tuple(call.scalars.items()),
            rank=rank_of_process(),
            moment=self.progress.now(in_backward=call.is_backward),
            device_type=result.device.type,
            in_block=site.in_block,
            rule_names=callers_of(forward_op or op, is_transposed=call.is_transposed),
            source=source + _row(inputs[0]) if kind == "input" else source,
        )
        return advised(finding, self._circumstances(call, finding), self._modules.address(site.module))

    def _circumstances(self, call: Call, finding: Finding) -> Circumstances:
        growth, grown = self._modules.growth() if finding.moment.optimizer_steps else (1.0, "")
        return Circumstances(
            base=call.traits.base,
            exponent=call.scalars.get("exponent"),
            growth=growth,
            grown=grown if growth >= GROWN else "",
            in_optimizer=self.progress.in_step,
            divisor=_maker(call.arguments[-1].tensor) if call.arguments and not finding.forward_op else "",
        )

    def of_function(self, site: Site, output: Tensor, inputs: Sequence[Tensor]) -> Finding:
        """Describe what a user's autograd function made outside of torch's ops."""
        in_backward = torch._C._current_autograd_node() is not None
        finding = Finding(
            kind="function",
            op=site.op,
            direction="backward" if in_backward else "forward",
            forward_op=site.op if in_backward else "",
            values=non_finite(output),
            module=site.module,
            place=site.where.place,
            caller=site.where.caller,
            dtype=output.dtype,
            limit=torch.finfo(output.dtype).max,
            rule="unchanged",
            output=summarise(output),
            inputs=tuple(summarise(tensor, f"input {index}") for index, tensor in enumerate(inputs)),
            numbers=(),
            rank=rank_of_process(),
            moment=self.progress.now(in_backward=in_backward),
            device_type=output.device.type,
        )
        return advised(finding, Circumstances(base=site.op), self._modules.address(site.module))

    def lesson(self, text: str, advice: str, **fields: object) -> Finding:
        """Describe why nothing is learnt.

        Args:
            text: what was measured.
            advice: what to do.
            **fields: of the finding.
        """
        finding = Finding(
            kind="learning",
            op="",
            direction="forward",
            forward_op="",
            values=NonFinite(),
            module="",
            place=None,
            caller=None,
            dtype=torch.float32,
            limit=math.inf,
            rule="unchanged",
            output=TensorSummary(name="", dtype=torch.float32, shape=(), lowest=math.nan, highest=math.nan),
            inputs=(),
            numbers=(),
            rank=rank_of_process(),
            moment=self.progress.now(in_backward=False),
        )
        return replace(finding, lesson=text, advice=advice, **fields)  # type: ignore[arg-type]

    def weight(self, tensor: Tensor) -> str:
        """Return the path of a weight; empty if the tensor is none."""
        return self._modules.weight(tensor) or (
            "(a parameter)" if isinstance(tensor, torch.nn.Parameter) else ""
        )

    def source(self, tensor: Tensor) -> str:
        """Return where a tensor was loaded; empty if that is not known."""
        return self._sources.get(tensor) or ""

    @staticmethod
    def function(tensor: Tensor) -> str:
        """Return the name of the user's autograd function that made a tensor; empty if none did."""
        node = tensor.grad_fn
        while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            is_view = any(
                name in node.name() for name in ("View", "Expand", "Unsqueeze", "Transpose", "TBackward")
            )
            node = node.next_functions[0][0] if is_view and node.next_functions else None
        return node.name().removesuffix("Backward") if node is not None else ""

    def _summary(self, call: Call, argument: Argument) -> TensorSummary:
        name = self._modules.weight(argument.tensor)
        written = " (now)" if argument.name in call.traits.written else ""
        return summarise(argument.tensor, (name or argument.label) + written)


def _row(summary: TensorSummary) -> str:
    return f", row {summary.first[0]}" if len(summary.first) > 1 else ""


def _maker(tensor: Tensor) -> str:
    """Return the plain name of the op that made a tensor, sums with an eps and changes of shape left out."""
    node = tensor.grad_fn
    for _ in range(4):
        if node is None or not node.name().startswith(_TRANSPARENT) or not node.next_functions:
            break
        node = next((source for source, _ in node.next_functions if source is not None), None)
    if node is None:
        return ""
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    return {"LinalgVectorNorm": "linalg_vector_norm"}.get(name, name.lower())


def fold(paths: Sequence[str]) -> str:
    """Return one pattern for the paths of modules: siblings share it.

    Example:
        >>> fold(["Net.layers.0.attention", "Net.layers.1.attention"])
        'Net.layers.*.attention'
        >>> fold(["Net.head", "Net.body.out"])
        'Net.head and 1 more'
    """
    unique = list(dict.fromkeys(paths))
    parts = [path.split(".") for path in unique]
    if len(unique) == 1:
        return unique[0]
    levels = [set(names) for names in zip(*parts, strict=False)]
    are_siblings = len({len(part) for part in parts}) == 1 and all(
        len(names) == 1 or all(map(str.isdecimal, names)) for names in levels
    )
    if not are_siblings:
        return f"{unique[0]} and {len(unique) - 1} more"
    return ".".join(name if len(names) == 1 else "*" for name, names in zip(parts[0], levels, strict=True))
