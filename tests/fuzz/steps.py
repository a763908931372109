"""Steps, without a closure and with one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz import prelude
from tests.fuzz.events import NOT_SCALED_YET, Run, zero_grad
from tests.fuzz.model import NO, YES
from tests.fuzz.oracle import GaveUpError
from tests.fuzz.predictions import are_unscaled, error_of_missing_update, error_of_step, may_meet
from tests.fuzz.scale_model import DEFAULT, Disagreement
from tests.fuzz.scene import named, terms, value_of


def step(run: Run, o: int) -> None:
    if run.kind(o) in prelude.NEED_CLOSURE:
        closure(run, o, tuple((i, 2.0) for i in run.members(o)), True, "", None, DEFAULT)
    elif not run.oracle.used:
        run.scene.run(f"scaler.step(o{o})", YES, NOT_SCALED_YET)
    elif run.may_call(o) and _is_taken_on(run, o):
        skipped = run.see_skip(o, run.oracle.check(o))
        run.oracle.step(o, skipped)
        run.count_skip(o, skipped)
        run.scene.compare_weights()


def _is_taken_on(run: Run, o: int) -> bool:
    """Run ``step``; return whether it was not refused."""
    expected = "gradients were changed|already been called"
    return not run.scene.run(f"scaler.step(o{o})", error_of_step(run.oracle, o), expected)


def raw_step(run: Run, o: int) -> None:
    oracle, members = run.oracle, run.members(o)
    if run.kind(o) in prelude.NEED_CLOSURE or o not in oracle.known:
        return
    if are_unscaled(oracle, members) and oracle.finite(members):
        run.scene.run(f"o{o}.step()")
        oracle.optimizers[o].step()
        run.scene.compare_weights()


_MAY_LOOK_FIRST = {"third_party", "two_calls"}


@dataclass(frozen=True, kw_only=True)
class _Closure:
    """What a closure does."""

    loss: str  # the function that computes it
    pairs: list[tuple[int, float]]  # its terms
    zero: bool | None  # gradients first: True to None, False in place
    edit: str  # of gradients after its backward
    limit: float  # where it clips
    factors: list[float]  # of the loss in each call; inf overflows
    name: str  # of the scale

    def lines(self, o: int, own: list[int]) -> str:
        lines = [f"factors = {self.factors}", "def closure():"]
        if self.zero is not None:
            lines.append(f"    o{o}.zero_grad(set_to_none={self.zero})")
        lines.append(f"    value = {self.loss}({terms(self.pairs)}) * factors.pop(0)")
        lines.append(f"    scaler.scale(value{named(self.name)}).backward()")
        calls = {
            "clip norm": f"clip_grad_norm_(o{o}, {self.limit})",
            "clip value": f"clip_grad_value_(o{o}, {self.limit})",
        }
        if self.edit:
            lines.append(f"    scaler.{calls.get(self.edit, f'ensure_unscaled(o{o})')}")
        if self.edit == "decay":
            lines += [f"    p{i}.grad.add_(p{i}.detach().abs(), alpha=0.1)" for i in own]
        return "\n".join([*lines, "    return value", f"scaler.step(o{o}, closure)"])


def closure(
    run: Run, o: int, pairs: Any, zero: bool | None, edit: str, overflow: int | None, name: str
) -> None:
    oracle, own = run.oracle, run.members(o)
    if not may_meet(oracle, o):
        return
    to_minimum = run.kind(o) == "lbfgs"  # learns nothing from gradients of one length, so it clips far out
    if to_minimum:
        pairs, zero = [pair for pair in pairs if pair[0] in own], zero is not False
        edit = edit if edit != "decay" else ""
    made = _Closure(
        loss="bowl" if to_minimum else "loss",
        pairs=[*pairs, *((i, 1.0) for i in own if i not in dict(pairs))],
        zero=zero,
        edit=edit,
        limit=50.0 if to_minimum else 0.5,
        factors=[math.inf if call == overflow else 1.0 for call in range(6)],
        name=name,
    )
    oracle.meet(o)
    if run.scene.run(made.lines(o, own), error_of_missing_update(oracle, o), "already been called"):
        return
    gave_up = _mirror(run, o, made)
    oracle.close(o, gave_up)
    run.count_skip(o, gave_up)
    if to_minimum:  # where gradients repeat to the last bit, LBFGS divides by their rounding and leaps
        run.scene.compare_weights(rtol=1e-2, farthest=1e3)
    else:
        run.scene.compare_weights()
    if gave_up:
        zero_grad(run, o, set_to_none=True)
    elif to_minimum:
        run.scene.take_gradients(oracle.present(own))


def _mirror(run: Run, o: int, given: _Closure) -> bool:
    """Do on the oracle what the real side has done; return whether the step was given up."""
    calls = len(given.factors) - len(run.scene["factors"])
    skipped = run.scene["scaler"].last_step(run.scene[f"o{o}"]).skipped
    window = run.oracle.windows[o]
    if run.kind(o) in _MAY_LOOK_FIRST and (window.fresh != NO or window.grown):
        allowed = run.oracle.check(o)
        if (calls == 0) not in allowed:
            raise Disagreement(
                f"{calls} calls of the closure; whether gradients had overflowed before: {allowed}"
            )
        if calls == 0:
            return True
        run.oracle.unscale(o, explicit=True)
    made = 0

    def closure() -> torch.Tensor:
        nonlocal made
        weighted = [(i, factor * given.factors[made]) for i, factor in given.pairs]
        made += 1
        found = _call(run, o, given, weighted)
        if found == {True} or (True in found and skipped and made == calls):
            raise GaveUpError
        return value_of(given.loss, weighted, run.oracle.params)

    gave_up = run.oracle.run_closure(o, closure)
    if (made, gave_up) != (calls, skipped):
        what = f"{calls} calls of the closure, skipped={skipped}"
        raise Disagreement(f"{what}; it should have been {made}, skipped={gave_up}")
    return gave_up


def _call(run: Run, o: int, given: _Closure, weighted: Any) -> set[bool]:
    """One call of the closure; returns the answers allowed: whether the step is given up."""
    oracle, own = run.oracle, run.members(o)
    if given.zero is not None:
        oracle.clear(own, zeroed=not given.zero)
    oracle.scale(given.name)
    run.backward(given.name, given.loss, weighted)
    if given.edit:
        oracle.unscale(o, explicit=given.edit in {"ensure", "decay"})
    if given.edit == "clip norm":
        oracle.clip_norm(own, given.limit, 2.0)
    for index in oracle.present(own):
        param = oracle.params[index]
        if given.edit == "clip value":
            param.grad.clamp_(-given.limit, given.limit)
        elif given.edit == "decay":
            decay = 0.1 * param.detach().abs()
            oracle.edit(index, lambda grad: grad.add_(decay))
    found = oracle.check(o)
    oracle.unscale(o, explicit=True)
    return found
