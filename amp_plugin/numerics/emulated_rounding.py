"""Run a program with the roundings of another implementation, such as an inference engine.

``EmulatedRounding`` adds a rounding step to the results or operands of chosen ops. ``attention_in_steps``
computes attention in separate steps instead of in a fused kernel, to imitate the roundings of other kernels.
The emulated roundings change values but not dtypes, so the program needs no changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region
from amp_plugin.numerics.places import Place

_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"})
_FP8: Final = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPlace:
    """A place where rounding can be emulated, which is one op on one line of a program.

    Attributes:
        op: The name of the op without namespace and overload, such as ``"mul"``.
        module: The class of the module that calls the op; empty outside modules.
        line: The line of the program that calls the op; None if unknown.
        is_operand: True if the operands are rounded, False if the results are.
    """

    op: str
    module: str
    line: Place | None = None
    is_operand: bool = False

    @property
    def is_product(self) -> bool:
        """Whether the op is a matrix product."""
        return self.op in _PRODUCTS

    @property
    def operands(self) -> OpPlace:
        """The operands of the same op."""
        return replace(self, is_operand=True)

    @property
    def scope(self) -> str:
        """The class of the module and the name of the function, separated by a dot."""
        return f"{self.module}.{self.line.function if self.line else ''}"

    def __str__(self) -> str:
        where = f", {Path(self.line.file).name}:{self.line.line}" if self.line else ""
        return f"{self.op} in {self.scope}{where}"


class EmulatedRounding(Region):  # type: ignore[no-untyped-call]
    """A region that rounds the results or operands of chosen ops in forward passes.

    Args:
        dtype: The dtype to round to. Results are rounded only if their dtype is wider than ``dtype``.
        places: The ops and lines at which to round. If no places are given, nothing is rounded, and ``found``
            lists all ops and lines whose results can be rounded.

    Attributes:
        found: Maps an op and a line of code to the shape of the first result that the op produced there. Only
            ops whose results are wider than ``dtype`` are included. The entries are in the order in which the
            ops first ran. If places are given, ``found`` contains only ops that belong to a given place.
        product: The module that called the last matrix product of the forward pass; None if there is none.
        last: The op and line of the last matrix product. None if the result of this product is not wider than
            ``dtype``.
    """

    def __init__(self, dtype: torch.dtype, places: Iterable[OpPlace] = ()) -> None:
        self._dtype = dtype
        # Maps the name of an op to the places where its rounding is emulated.
        # If any place is given, ops without a place are skipped to save time.
        self._chosen: dict[str, set[OpPlace]] = {}
        for place in places:
            self._chosen.setdefault(place.op, set()).add(place)
        self.found: dict[OpPlace, tuple[int, ...]] = {}
        self.product: nn.Module | None = None
        self.last: OpPlace | None = None
        super().__init__(Tracker(), self)

    def after(self, call: Call, output: Any) -> None:
        """Record the op and its line, and round the results or operands that were chosen for rounding."""
        traits = call.traits
        if call.is_backward or traits.is_view or traits.is_collective or traits.is_unwritten:
            return
        if traits.moves and traits.base != "embedding":
            return
        if self._chosen and traits.base not in self._chosen:
            return
        if traits.base in _PRODUCTS:
            self.product, self.last = self.tracker.running(), None
        results = [made.tensor for made in call.made(output) if self._is_wider(made.tensor)]
        if not results:
            return
        module = self.tracker.running()
        name = "" if module is None else type(module).__name__
        place = OpPlace(op=traits.base, module=name, line=call.site.place)
        self.found.setdefault(place, tuple(results[0].shape))
        self.last = place if place.is_product else self.last
        self._round(call, results, place)

    def _is_wider(self, tensor: Tensor) -> bool:
        is_weight = bool(self.tracker.weight(tensor))
        return tensor.is_floating_point() and tensor.itemsize > self._dtype.itemsize and not is_weight

    def _round(self, call: Call, results: list[Tensor], place: OpPlace) -> None:
        """Round the results, the operands or both, as chosen for the op that ran."""
        chosen, made = self._chosen.get(place.op, set()), results
        if place.operands in chosen:
            given = call.changed(self._rounded, results[0].dtype)
            made = call.again(given, results) or results
        is_rounded = place in chosen
        for result, value in zip(results, made, strict=True):
            if is_rounded or value is not result:
                result.copy_(self._rounded(value) if is_rounded else value)

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same dtype with rounded values."""
        if not tensor.is_floating_point() or tensor.itemsize <= self._dtype.itemsize:
            return tensor
        return tensor.to(self._dtype).to(tensor.dtype)


ATTENTION: Final = {
    "softmax": "scores and probabilities of the attention are rounded",
    "scale": "the attention multiplies the query by the scale after casting the query",
    "cache": "keys and values of the attention are kept in fp8",
}
"""Maps the name of each rounding that ``attention_in_steps`` can emulate to a description."""


class AttentionInSteps(TorchFunctionMode):
    """A context manager in which ``attention_in_steps`` replaces ``scaled_dot_product_attention``.

    Args:
        dtype: The dtype to which numbers are rounded.
        roundings: The roundings to emulate, by their names in ``ATTENTION``.
    """

    def __init__(self, dtype: torch.dtype, roundings: Iterable[str] = ()) -> None:
        super().__init__()
        self._attention = partial(attention_in_steps, rounded_to=dtype, roundings=frozenset(roundings))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function, with ``attention_in_steps`` in place of ``scaled_dot_product_attention``."""
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
    """Compute ``scaled_dot_product_attention`` op by op, with the given roundings from ``ATTENTION``.

    Operands are cast as autocast would cast them. As in fused kernels, the scores are computed in float32.
    The exponentials of the scores are cast to the dtype of the operands, and are then multiplied by the
    values. The product is divided by the sum of the exponentials.
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
    """Return a boolean tensor that is True where a query attends to a key."""
    everywhere = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if is_causal:
        everywhere = everywhere.tril()
    return everywhere & mask if mask is not None and mask.dtype is torch.bool else everywhere
