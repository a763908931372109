"""What users do to gradients and weights by hand."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.predictions import are_unscaled, may_edit
from tests.fuzz.run import Run
from tests.fuzz.scene import params

_EDITS = {
    "in place": "{p}.grad.mul_({factor})",
    "replaced": "{p}.grad = {p}.grad * {factor}",
    "data": "{p}.grad.data.mul_({factor})",
    "numpy": "{p}.grad.numpy()[...] *= {factor}",
}
_INJECTIONS = {
    "in place": "{p}.grad[0] = {value}",
    "data": "{p}.grad.data[0] = {value}",
    "replaced": "{p}.grad = {p}.grad.clone(); {p}.grad[0] = {value}",
}


def zero_grad(run: Run, o: int, set_to_none: bool) -> None:
    run.scene.run(f"o{o}.zero_grad(set_to_none={set_to_none})")
    run.oracle.clear(run.members(o), zeroed=not set_to_none)


def drop_one(run: Run, index: int) -> None:
    if run.oracle.present([index]):
        run.scene.run(f"p{index}.grad = None")
        run.oracle.clear([index], zeroed=False)


def edit(run: Run, o: int, kind: str, factor: float, wanted: Any) -> None:
    """Multiply gradients, in whatever unit they are."""
    members = run.oracle.present(run.members(o))
    indices = members if kind == "collective" else [i for i in wanted if i in members]
    if not indices or not all(may_edit(run.oracle, i) for i in indices):
        return
    factor = _moderate(run, indices, factor)
    if kind == "collective":
        run.scene.run(f"collective({factor}, {', '.join(f'p{i}.grad' for i in indices)})")
    for index in indices:
        if kind != "collective":
            run.scene.run(_EDITS[kind].format(p=f"p{index}", factor=factor))
        run.oracle.edit(index, lambda grad: grad.mul_(factor), replaced=kind == "replaced")


def _moderate(run: Run, indices: list[int], factor: float) -> float:
    """The factor or its inverse, whichever keeps gradients in the middle."""
    largest = max(run.oracle.params[i].grad.abs().max().item() for i in indices)
    return 1.0 / factor if (factor > 1.0) == (largest > 1e3) else factor


def inject(run: Run, index: int, value: str, kind: str) -> None:
    if may_edit(run.oracle, index):
        run.scene.run(_INJECTIONS[kind].format(p=f"p{index}", value=value))

        def write(grad: torch.Tensor) -> None:
            grad[0] = float(value)

        run.oracle.edit(index, write, replaced=kind == "replaced")


def repair(run: Run, index: int) -> None:
    if may_edit(run.oracle, index):
        run.scene.run(f"p{index}.grad.nan_to_num_(0.0, 0.0, 0.0)")
        run.oracle.edit(index, lambda grad: grad.nan_to_num_(0.0, 0.0, 0.0))


def edit_unscaled(run: Run, o: int, kind: str) -> None:
    """What users do with unscaled gradients: torch's clipping, weight decay."""
    oracle, members = run.oracle, run.oracle.present(run.members(o))
    if not members or not are_unscaled(oracle, members) or not oracle.finite(members):
        return
    if kind == "decay":
        for index in members:
            run.scene.run(f"p{index}.grad.add_(p{index}.detach().abs(), alpha=0.1)")
            decay = 0.1 * oracle.params[index].detach().abs()
            oracle.edit(index, lambda grad: grad.add_(decay))
        return
    call, limit = ("clip_grad_norm_", 1.0) if kind == "torch norm" else ("clip_grad_value_", 0.5)
    run.scene.run(f"torch.nn.utils.{call}([{params(members)}], {limit})")
    getattr(torch.nn.utils, call)([oracle.params[i] for i in members], limit)
    for index in members:
        oracle.edit(index, lambda grad: None)


def swap(run: Run, index: int) -> None:
    if not run.oracle.present([index]) and run.early is None and index not in run.owned_by("takes_gradients"):
        run.scene.run(f"torch.utils.swap_tensors(p{index}, Parameter(p{index}.detach().clone()))")
