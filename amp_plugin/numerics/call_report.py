"""All there is to say about one call of an op, put together when there is a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amp_plugin.numerics.advice import advice_for, is_cured_by_fp32
from amp_plugin.numerics.cures import cures_of
from amp_plugin.numerics.finding import Finding, Kind
from amp_plugin.numerics.forward_sites import ForwardSites, Site, in_autocast_block, runs_backward
from amp_plugin.numerics.module_paths import ModulePaths
from amp_plugin.numerics.op_call import Argument, arguments_of, scalars_of
from amp_plugin.numerics.op_traits import OpTraits
from amp_plugin.numerics.places import called_from
from amp_plugin.numerics.progress import Progress
from amp_plugin.numerics.rank import rank_of_process
from amp_plugin.numerics.region_rules import callers_of, rule_of
from amp_plugin.numerics.tensor_summary import NonFinite, TensorSummary, summarise


class CallReport:
    """One call of an op, while it runs.

    Args:
        traits: of the op.
        args, kwargs: what it was given.
        modules: knows which module runs.
        sites: know the forward ops of a backward pass.
        progress: knows which pass runs.
    """

    def __init__(
        self,
        traits: OpTraits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        modules: ModulePaths,
        sites: ForwardSites,
        progress: Progress,
    ) -> None:
        self.traits = traits
        self.arguments = arguments_of(traits, args, kwargs)
        self.node = torch._C._current_autograd_node()
        self._args, self._kwargs = args, kwargs
        self._modules, self._sites, self._progress = modules, sites, progress

    @property
    def is_backward(self) -> bool:
        """Whether a backward pass runs the op."""
        return runs_backward(self.node)

    @property
    def accumulates(self) -> bool:
        """Whether autograd adds a gradient to that of a leaf."""
        return self.is_backward and self.node.name().endswith("AccumulateGrad")

    @property
    def scalars(self) -> dict[str, float]:
        """The Python numbers among the arguments, by name."""
        return scalars_of(self.traits, self._args, self._kwargs)

    def site(self) -> Site:
        """Return where the op was called; in a backward pass, where its forward op was."""
        return self._sites.of(self.node) or Site(
            self.traits.name, self._modules.current(), called_from(), in_autocast_block()
        )

    def finding(
        self,
        kind: Kind,
        result: Tensor,
        values: NonFinite,
        read: Argument | None = None,
        made: Site | None = None,
    ) -> Finding:
        """Describe an origin that this op made or was the first to read.

        Args:
            kind: what kind of origin.
            result: a result that is not finite.
            values: the numbers that the origin is of.
            read: the argument that held them already.
            made: where they were made, if not here.
        """
        site = made or self.site()
        shown = [read] if read else self.arguments
        in_backward = made is None and self.is_backward
        op = made.op if made else self.traits.name
        forward_op = self._forward_op() if in_backward else ""
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
            rule=rule_of(self.traits.name, result.device.type, is_transposed=self._is_transposed),
            output=summarise(result),
            inputs=tuple(self._summary(argument) for argument in shown),
            numbers=tuple(self.scalars.items()),
            rank=rank_of_process(),
            moment=self._progress.now(in_backward=self.is_backward),
            device_type=result.device.type,
            in_block=site.in_block,
            rule_names=callers_of(forward_op or op, is_transposed=self._is_transposed),
        )
        if site.in_block and is_cured_by_fp32(finding, self.traits.base):
            module = self._modules.address(finding.module)
            finding = replace(finding, cures=cures_of(module, finding.rule_names, finding.device_type))
        largest_weight = self._modules.largest_weight(finding.module)
        advice = advice_for(finding, self.traits.base, self._exponent(), largest_weight)
        return replace(finding, advice=advice)

    def here(self) -> str:
        """Say where the op was called, in one line."""
        site = self.site()
        return " at ".join(filter(None, (self.traits.name, str(site.where.place or ""))))

    def weight(self, tensor: Tensor) -> str:
        """Return the path of a weight; empty if the tensor is none."""
        return self._modules.weight(tensor) or (
            "(a parameter)" if isinstance(tensor, torch.nn.Parameter) else ""
        )

    def _summary(self, argument: Argument) -> TensorSummary:
        name = self._modules.weight(argument.tensor)
        written = " (now)" if argument.name in self.traits.written else ""
        return summarise(argument.tensor, (name or argument.label) + written)

    def _forward_op(self) -> str:
        """Return the forward op's name; of a function of the user's, that of its node."""
        forward = self._sites.of(self.node)
        if isinstance(self.node, torch.autograd.function.BackwardCFunction) or forward is None:
            return str(self.node.name())
        return forward.op

    @property
    def _is_transposed(self) -> bool:
        """Whether this is a transposed convolution, or its backward pass."""
        given = {**dict(zip(self.traits.arguments, self._args, strict=False)), **self._kwargs}
        return given.get("transposed") is True

    def _exponent(self) -> float | None:
        return self.scalars.get("exponent")
