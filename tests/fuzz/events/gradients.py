"""Losses and their backward passes, unscaling and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fuzz.model import YES
from tests.fuzz.predictions import are_unscaled, error_of_unscale, is_disputed
from tests.fuzz.run import NOT_SCALED_YET, Run
from tests.fuzz.scale_model import Disagreement, OutOfDomainError
from tests.fuzz.scene import named, params, terms


def backward(run: Run, name: str, pairs: Any, overflow: int | None) -> None:
    """``scale(loss).backward()``; perhaps with a gradient that is not finite."""
    pairs = [(i, math.inf if i == overflow else factor) for i, factor in pairs]
    run.scene.run(f"scaler.scale(loss({terms(pairs)}){named(name)}).backward()")
    run.oracle.scale(name)
    run.backward(name, "loss", pairs)


def scale_early(run: Run, name: str, pairs: Any) -> None:
    run.scene.run(f"early = scaler.scale(linear({terms(pairs)}){named(name)})")
    run.oracle.scale(name)
    run.early = (name, pairs)


def backward_early(run: Run) -> None:
    if run.early is not None:
        run.scene.run("early.backward(); del early")
        (name, pairs), run.early = run.early, None
        run.backward(name, "linear", pairs)


def regularise(run: Run, o: int) -> None:
    """Add the gradient of a loss that is not scaled to unscaled gradients."""
    members = run.members(o)
    if are_unscaled(run.oracle, members) and run.oracle.present(members) == members:
        pairs = [(i, 0.5) for i in members]
        run.scene.run(f"linear({terms(pairs)}).backward()")
        for index in members:
            run.oracle.edit(index, lambda grad: grad.add_(0.5))


def unscale(run: Run, o: int) -> None:
    line, oracle = f"scaler.unscale_(o{o})", run.oracle
    if not oracle.used:
        run.scene.run(line, YES, NOT_SCALED_YET)
    elif run.may_call(o) and not run.scene.run(line, error_of_unscale(oracle, o), r"unscale_\(\) (has|is)"):
        run.take_side(o)
        oracle.unscale(o, explicit=True)


def ensure_unscaled(run: Run, o: int) -> None:
    if run.may_call(o):
        run.scene.run(f"scaler.ensure_unscaled(o{o})")
        run.take_side(o)
        run.oracle.unscale(o, explicit=True)


def clip_norm(run: Run, o: int, limit: float, norm_type: float, fold: bool) -> None:
    oracle, members = run.oracle, run.members(o)
    strangers = [other for other in range(len(oracle.members)) if other not in {o, *oracle.known}]
    fold = fold and not any(i in run.members(other) for other in strangers for i in members)
    if not run.may_call(o) or is_disputed(oracle, o):
        return
    folded = ", fold=True" if fold else ""
    run.scene.run(f"norm = scaler.clip_grad_norm_(o{o}, {limit}, norm_type={norm_type}{folded})")
    if fold:
        oracle.fold(o, limit, norm_type)
    else:
        oracle.unscale(o, explicit=False)
    _compare_norm(run, _clipped(run, [o], members, limit, norm_type))


def clip_norm_of_params(run: Run, indices: Any, limit: float, norm_type: float, fold: bool) -> None:
    folded = ", fold=True" if fold else ""
    call = f"clip_grad_norm_([{params(indices)}], {limit}, norm_type={norm_type}{folded})"
    if _clip_params(run, indices, f"norm = scaler.{call}"):
        owners = [o for o in run.oracle.known if set(run.members(o)) & set(indices)]
        _compare_norm(run, _clipped(run, owners, indices, limit, norm_type))


def _clipped(run: Run, owners: list[int], indices: Any, limit: float, norm_type: float) -> float:
    """Clip true gradients; whether those are that had overflowed, and were written over, is not promised."""
    oracle = run.oracle
    norm = oracle.norm(indices, norm_type)
    if limit < norm < math.inf and any(True in oracle.seen.skips(o, run.members(o)) for o in owners):
        raise OutOfDomainError("a clip of gradients whose step is skipped")
    return oracle.clip_norm(indices, limit, norm_type)


def clip_value(run: Run, o: int, indices: Any, limit: float) -> None:
    if indices is not None:
        if _clip_params(run, indices, f"scaler.clip_grad_value_([{params(indices)}], {limit})"):
            _clamp(run, indices, limit)
    elif run.may_call(o) and not is_disputed(run.oracle, o):
        run.scene.run(f"scaler.clip_grad_value_(o{o}, {limit})")
        run.oracle.unscale(o, explicit=False)
        _clamp(run, run.members(o), limit)


def _clip_params(run: Run, indices: Any, line: str) -> bool:
    """Run a clip of parameters, which unscales those of their optimizers, or of the one that has no others; return whether it was not refused."""
    oracle = run.oracle
    touched = [o for o in oracle.known if set(run.members(o)) & set(indices)]
    exactly = [o for o in touched if set(run.members(o)) == set(indices)]
    touched = exactly if len(exactly) == 1 else touched
    if not oracle.used or any(is_disputed(oracle, o) for o in touched):
        return False
    if not all(map(oracle.owners, oracle.present(indices))):
        run.scene.run(line, YES, "belong to no optimizer this scaler knows")
        return False
    run.scene.run(line)
    for o in touched:
        oracle.unscale(o, explicit=False)
    return True


def _clamp(run: Run, indices: Any, limit: float) -> None:
    """Clip true gradients by value; whether inf or nan was there is not promised, so look."""
    for index in run.oracle.present(indices):
        grad, real = run.oracle.params[index].grad, run.scene.params[index].grad
        grad.copy_(torch.where(grad.isfinite(), grad.clamp(-limit, limit), real.double()))


def _compare_norm(run: Run, right: float) -> None:
    norm = run.scene["norm"].item()
    if math.isfinite(right):
        same = math.isclose(norm, right, rel_tol=1e-5, abs_tol=1e-30)
    else:
        same = not math.isfinite(norm)
    if not same:
        raise Disagreement(f"the norm is {norm}, it should be {right}")
