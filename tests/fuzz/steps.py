"""Optimizer steps, with and without a closure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.events import NOT_SCALED_YET, Run, zero_grad
from tests.fuzz.model import NO, YES, error_of_missing_update, error_of_step, may_meet
from tests.fuzz.oracle import GaveUpError
from tests.fuzz.scale_model import DEFAULT, Disagreement
from tests.fuzz.scene import named, terms, value_of


def step(run: Run, o: int) -> None:
    _step(run, o, f"scaler.step(o{o})")


def clip_and_step(run: Run, o: int, limit: float, norm_type: float) -> None:
    line = f"result = scaler.clip_and_step(o{o}, {limit}, norm_type={norm_type})"

    def clip() -> None:
        members = run.members(o)
        run.clipped([o], members, limit, norm_type)
        if run.oracle.present(members):
            run.compare_norm(run.scene["result"].clipped_norm.item(), run.oracle.norm(members, norm_type))

    _step(run, o, line, clip)


def _step(run: Run, o: int, line: str, clip: Callable[[], None] = lambda: None) -> None:
    if run.kind(o) == "two_calls":
        closure(run, o, tuple((i, 2.0) for i in run.members(o)), True, "", None, DEFAULT)
    elif not run.oracle.used:
        run.scene.run(line, YES, NOT_SCALED_YET)
    elif run.may_call(o):
        error = error_of_step(run.oracle, o)
        if not run.scene.run(line, error, "already been called|No inf checks"):
            skipped = run.see_skip(o, run.oracle.check(o))
            clip()
            run.oracle.step(o, skipped)
            run.count_skip(o, skipped)
            run.scene.compare_weights()


_LIMIT = 0.5  # the norm that closures clip to
_MAY_LOOK_FIRST = {"third_party", "two_calls"}


@dataclass(frozen=True, kw_only=True)
class _Closure:
    """Describes what a closure does."""

    pairs: list[tuple[int, float]]  # the terms of its loss
    # how it clears gradients first: True sets them to None, False to zero; None does not clear
    zero: bool | None
    edit: str  # how it edits gradients after its backward
    factors: list[float]  # the factor of the loss in each call; inf makes it overflow
    name: str  # the name of the loss's scale

    def lines(self, o: int, own: list[int]) -> str:
        lines = [f"factors = {self.factors}", "def closure():"]
        if self.zero is not None:
            lines.append(f"    o{o}.zero_grad(set_to_none={self.zero})")
        lines.append(f"    value = loss({terms(self.pairs)}) * factors.pop(0)")
        lines.append(f"    scaler.scale(value{named(self.name)}).backward()")
        calls = {
            "clip norm": f"clip_grad_norm_(o{o}, {_LIMIT})",
            "clip value": f"clip_grad_value_(o{o}, {_LIMIT})",
        }
        if self.edit:
            lines.append(f"    scaler.{calls.get(self.edit, f'core.ensure_unscaled(o{o})')}")
        if self.edit == "decay":
            lines += [f"    p{i}.grad.add_(p{i}.detach().abs(), alpha=0.1)" for i in own]
        return "\n".join([*lines, "    return value", f"scaler.step(o{o}, closure)"])


def closure(
    run: Run, o: int, pairs: Any, zero: bool | None, edit: str, overflow: int | None, name: str
) -> None:
    oracle, own = run.oracle, run.members(o)
    if not may_meet(oracle, o):
        return
    made = _Closure(
        pairs=[*pairs, *((i, 1.0) for i in own if i not in dict(pairs))],
        zero=zero,
        edit=edit,
        factors=[math.inf if call == overflow else 1.0 for call in range(6)],
        name=name,
    )
    oracle.meet(o)
    if run.scene.run(made.lines(o, own), error_of_missing_update(oracle, o), "already been called"):
        return
    gave_up = _mirror(run, o, made)
    oracle.close(o, gave_up)
    run.count_skip(o, gave_up)
    run.scene.compare_weights()
    if gave_up:
        zero_grad(run, o, set_to_none=True)


def _mirror(run: Run, o: int, given: _Closure) -> bool:
    """Do on the oracle what the real side did. Return whether the step was given up."""
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
        return value_of("loss", weighted, run.oracle.params)

    gave_up = run.oracle.run_closure(o, closure)
    if (made, gave_up) != (calls, skipped):
        what = f"{calls} calls of the closure, skipped={skipped}"
        raise Disagreement(f"{what}; it should have been {made}, skipped={gave_up}")
    return gave_up


def _call(run: Run, o: int, given: _Closure, weighted: Any) -> set[bool]:
    """Make one call of the closure.

    Return the allowed answers to the question whether the step is given up.
    """
    oracle, own = run.oracle, run.members(o)
    if given.zero is not None:
        oracle.clear(own, zeroed=not given.zero)
    oracle.scale(given.name)
    run.backward(given.name, "loss", weighted)
    if given.edit:
        oracle.unscale(o, explicit=given.edit in {"ensure", "decay"})
    if given.edit == "clip norm":
        oracle.clip_norm(own, _LIMIT, 2.0)
    for index in oracle.present(own):
        param = oracle.params[index]
        if given.edit == "clip value":
            param.grad.clamp_(-_LIMIT, _LIMIT)
        elif given.edit == "decay":
            decay = 0.1 * param.detach().abs()
            oracle.edit(index, lambda grad: grad.add_(decay))
    found = oracle.check(o)
    oracle.unscale(o, explicit=True)
    return found
