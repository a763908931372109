"""Emulate roundings that another implementation of a program may have, while the program runs.

``EmulatedRounding`` rounds the results of chosen ops once more. ``attention_in_steps`` computes torch's fused
attention in steps, with the roundings that fused kernels differ in. Both change numbers, not dtypes, so a
program runs with them as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region

_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"})
_FP8: Final = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPlace:
    """An op on a line of a program.

    Attributes:
        op: its name without namespace and overload, ``"mul"``.
        module: the class of the module that calls it; empty outside of modules.
        file: the file of the line; empty if no line is known.
        line: the number of the line.
        function: the function that the line is in.
    """

    op: str
    module: str
    file: str
    line: int
    function: str

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        return self.op in _PRODUCTS

    @property
    def scope(self) -> str:
        """The class of the module and the function."""
        return f"{self.module}.{self.function}"

    def __str__(self) -> str:
        where = f", {Path(self.file).name}:{self.line}" if self.file else ""
        return f"{self.op} in {self.scope}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """What to round at a place: the result of the op, its operands, or both."""

    result: bool = True
    operands: bool = False


class EmulatedRounding(Region):  # type: ignore[no-untyped-call]
    """A region in which the results of chosen ops are rounded once more. It runs forward passes only.

    Args:
        dtype: the narrower dtype. Only results that are wider than it are rounded.
        roundings: what to round, by place. Without any, nothing is changed, and the places are found.

    Attributes:
        found: the places of all results that are wider than ``dtype`` -> the shape of the first one, in the
            order in which they first ran. With ``roundings``, the places of their ops only.
        product: the module that called the last matrix product of the forward pass; None if there is none.
        last: the place of that product; None if its result is not wider than ``dtype``.
    """

    def __init__(self, dtype: torch.dtype, roundings: Mapping[OpPlace, Rounded] | None = None) -> None:
        self._dtype, self._roundings = dtype, dict(roundings or {})
        self._ops = {place.op for place in self._roundings}  # to find the place of others takes time
        self.found: dict[OpPlace, tuple[int, ...]] = {}
        self.product: nn.Module | None = None
        self.last: OpPlace | None = None
        super().__init__(Tracker(), self)

    def after(self, call: Call, output: Any) -> None:
        """Note the place of a result, and round the result if it is chosen."""
        traits = call.traits
        if call.is_backward or traits.is_view or traits.is_collective or traits.is_unwritten:
            return
        if traits.moves and traits.base != "embedding":
            return
        if self._ops and traits.base not in self._ops:
            return
        if traits.base in _PRODUCTS:
            self.product, self.last = self.tracker.running(), None
        results = [made.tensor for made in call.made(output) if self._is_wider(made.tensor)]
        if not results:
            return
        place = self._place(call)
        self.found.setdefault(place, tuple(results[0].shape))
        self.last = place if place.is_product else self.last
        if chosen := self._roundings.get(place):
            self._round(call, results, chosen)

    def _is_wider(self, tensor: Tensor) -> bool:
        is_weight = bool(self.tracker.weight(tensor))
        return tensor.is_floating_point() and tensor.itemsize > self._dtype.itemsize and not is_weight

    def _place(self, call: Call) -> OpPlace:
        line, module = call.site.place, self.tracker.running()
        return OpPlace(
            op=call.traits.base,
            module="" if module is None else type(module).__name__,
            file="" if line is None else line.file,
            line=0 if line is None else line.line,
            function="" if line is None else line.function,
        )

    def _round(self, call: Call, results: list[Tensor], chosen: Rounded) -> None:
        made = results
        if chosen.operands:
            given = call.changed(self._rounded, results[0].dtype)
            made = call.again(given, results) or results
        for result, value in zip(results, made, strict=True):
            result.copy_(self._rounded(value) if chosen.result else value)

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values rounded, in its own dtype."""
        if not tensor.is_floating_point() or tensor.itemsize <= self._dtype.itemsize:
            return tensor
        return tensor.to(self._dtype).to(tensor.dtype)


ATTENTION: Final = {
    "softmax": "scores and probabilities of the attention are rounded",
    "scale": "the attention multiplies the query by the scale after its cast",
    "cache": "keys and values of the attention are kept in fp8",
}
"""Roundings of an attention by name, and what they are in words."""


class AttentionInSteps(TorchFunctionMode):
    """A block in which ``scaled_dot_product_attention`` runs in steps, with roundings of one's choice.

    Args:
        dtype: the dtype that numbers are rounded to.
        roundings: names of ``ATTENTION``.
    """

    def __init__(self, dtype: torch.dtype, roundings: Iterable[str] = ()) -> None:
        super().__init__()
        self._attention = partial(attention_in_steps, rounded_to=dtype, roundings=frozenset(roundings))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; an attention in steps."""
        if func is scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_in_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rounded_to: torch.dtype,
    roundings: frozenset[str],
) -> Tensor:
    """Return what ``scaled_dot_product_attention`` returns, with roundings of ``ATTENTION``.

    Operands are cast as autocast would. The rest is what fused kernels do: scores are computed in float32.
    Their exponentials are cast for the second product, and its result is divided by their sum.
    """
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device)
    operand = torch.get_autocast_dtype(device) if is_cast else query.dtype
    with torch.autocast(device, enabled=False):
        q, k, v = (tensor.to(operand).float() for tensor in (query, key, value))
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if enable_gqa:
            k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
        if "cache" in roundings:
            k, v = (tensor.to(_FP8).float() for tensor in (k, v))
        if "scale" in roundings:
            q, factor = (q * factor).to(rounded_to).float(), 1.0
        scores = q @ k.transpose(-2, -1) * factor
        if "softmax" in roundings:
            scores = scores.to(rounded_to).float()
        scores = scores.masked_fill(~_mask(scores, attn_mask, is_causal=is_causal), -math.inf)
        if attn_mask is not None and attn_mask.is_floating_point():
            scores = scores + attn_mask.float()
        if "softmax" in roundings:
            weights, total = scores.softmax(-1).to(rounded_to).float(), torch.ones_like(scores[..., :1])
        else:
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            total = weights.sum(-1, keepdim=True)
        weights = torch.dropout(weights, dropout_p, train=True) if dropout_p else weights
        return (weights.to(operand).float() @ v / total).to(operand)


def _mask(scores: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Return where a query reads a key, as a boolean tensor."""
    everywhere = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if is_causal:
        everywhere = everywhere.tril()
    return everywhere & mask if mask is not None and mask.dtype is torch.bool else everywhere
