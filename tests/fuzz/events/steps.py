"""Steps without a closure."""

from __future__ import annotations

from tests.fuzz import prelude
from tests.fuzz.events.closures import closure
from tests.fuzz.predictions import are_unscaled, error_of_step
from tests.fuzz.run import NOT_SCALED_YET, Run
from tests.fuzz.scale_model import DEFAULT, OutOfDomainError
from tests.fuzz.seen_overflows import MAYBE, YES


def step(run: Run, o: int) -> None:
    """``step(optimizer)``."""
    if run.kind(o) == "takes_gradients":
        _step_without_gradients(run, o)
    elif run.kind(o) in prelude.NEED_CLOSURE:
        closure(run, o, tuple((i, 2.0) for i in run.members(o)), True, "", None, DEFAULT)
    elif not run.oracle.used:
        run.scene.run(f"scaler.step(o{o})", YES, NOT_SCALED_YET)
    elif run.may_call(o) and _is_taken_on(run, o):
        run.take_side(o)
        skipped = run.see_skip(o, run.oracle.check(o))
        run.oracle.step(o, skipped)
        run.count_skip(o, skipped)
        run.scene.compare_weights()


def _is_taken_on(run: Run, o: int) -> bool:
    """Run ``step``; return whether it was not refused."""
    expected = "gradients were changed|already been called"
    return not run.scene.run(f"scaler.step(o{o})", error_of_step(run.oracle, o), expected)


def _step_without_gradients(run: Run, o: int) -> None:
    """A scaled backward reached the parameters, but no gradient is there: an error, not a step."""
    reached = run.oracle.windows[o].fresh == YES
    if run.oracle.used:
        if run.scene.run(f"scaler.step(o{o})", YES if reached else MAYBE):
            raise OutOfDomainError
        run.oracle.meet(o)
        run.oracle.close(o, skipped=False)
    run.scene.compare_weights()


def raw_step(run: Run, o: int) -> None:
    """``optimizer.step()`` past the scaler, on unscaled gradients."""
    oracle, members = run.oracle, run.members(o)
    if run.kind(o) in {*prelude.NEED_CLOSURE, "takes_gradients"} or o not in oracle.known:
        return
    if are_unscaled(oracle, members) and oracle.finite(members):
        run.scene.run(f"o{o}.step()")
        oracle.optimizers[o].step()
        run.scene.compare_weights()
