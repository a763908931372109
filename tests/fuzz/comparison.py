"""Run a printed graph under amp_plugin's autocast and under torch's, and compare every bit."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import graphs, two_sides
from tests.fuzz.search import Fuzzer, Problem

_TORCHS_OWN = "Unexpected floating ScalarType"  # cat and similar ops refuse float16 in a bfloat16 region
# torch's cache of casts ignores the dtype. When a float16 region is recomputed inside backward, it finds the
# bfloat16 cast of a weight.
_TORCHS_CACHE = re.compile(
    "Recomputed values .* have different metadata|but got (Half and BFloat16|BFloat16 and Half)"
    "|but got: c10::(Half != c10::BFloat16|BFloat16 != c10::Half)"
)
_VIEWED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run(program: str, side: Any) -> tuple[dict[str, Tensor], str]:
    """Run a program. Return its tensors and gradients by name, and its error if there was one."""
    names = {**vars(two_sides), "side": side}
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(program, "<graph>", "exec"), names)
        except Exception as raised:  # noqa: BLE001 - it is compared
            error = re.sub(r"0x[0-9a-f]+", "", f"{type(raised).__name__}: {raised}")
    torch.clear_autocast_cache()
    tensors = {name: value for name, value in names.items() if isinstance(value, Tensor)}
    grads = {f"{name}.grad": v.grad for name, v in tensors.items() if v.is_leaf and v.grad is not None}
    return {**tensors, **grads}, error


def difference(program: str, ours: Callable[[], Any] = two_sides.Ours) -> str:
    """Run a program on both sides. Return what differs, or an empty result."""
    (mine, my_error), (right, error) = run(program, ours()), run(program, two_sides.Theirs())
    if _TORCHS_OWN in error or (not my_error and _TORCHS_CACHE.search(error)):
        return ""
    if my_error != error:
        return f"errors: {my_error or 'none'}; torch: {error or 'none'}"
    for name in [*right, *(mine.keys() - right.keys())]:
        if (name in mine) != (name in right):
            return f"{name} is missing on one side"
        if not same_bits(mine[name], right[name]):
            return f"{name} differs: {_described(mine[name])}; torch: {_described(right[name])}"
    return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, layout, ``requires_grad`` and bits. Nans count as equal."""
    if (a.dtype, a.shape, a.stride(), a.requires_grad) != (b.dtype, b.shape, b.stride(), b.requires_grad):
        return False
    a, b = a.detach(), b.detach()
    if not a.is_floating_point():
        return torch.equal(a, b)
    view = _VIEWED[a.dtype.itemsize]
    same = a.contiguous().view(view) == b.contiguous().view(view)
    return bool((same | (a.isnan() & b.isnan())).all())


def _described(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()
    return f"{tensor.dtype}, requires_grad={tensor.requires_grad}, {flat[:3].tolist()}"


def problem(nodes: tuple[graphs.Node, ...], ours: Callable[[], Any] = two_sides.Ours) -> Problem | None:
    program = graphs.printed(nodes)
    text = difference(program, ours)
    if not text:
        return None
    body = "\n".join(f"    {line}" for line in program.split("\n"))
    prelude = "from tests.fuzz.two_sides import *\nfor side in (Ours(), Theirs()):"
    kind = "gradients" if ".grad differs" in text else re.sub(r"\d+", "", text)[:20]
    return Problem(text, kind, f"{prelude}\n{body}")


GRAPHS = Fuzzer("graphs", graphs.generate, problem, graphs.shorter)
