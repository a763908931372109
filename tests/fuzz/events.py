"""One run of a sequence, and the events that can happen in it. Optimizer steps are in steps.py."""

import math
from typing import Any

import torch

from tests.fuzz.model import (
    YES,
    are_unscaled,
    error_of_copy,
    error_of_unscale,
    error_of_update,
    may_edit,
    may_meet,
    may_update,
)
from tests.fuzz.oracle import Oracle
from tests.fuzz.scale_model import Disagreement, OutOfDomainError
from tests.fuzz.scene import Scene, named, params, terms, value_of
from tests.fuzz.sequences import PARAMS, Setup

NOT_SCALED_YET = "Attempted .* but _scale is None"


class Run:
    """The state that events work on: the scaler's side and the oracle."""

    def __init__(self, setup: Setup, scaler: type) -> None:
        self.setup = setup
        self.oracle = Oracle(setup)
        self.scene = Scene(setup, self.oracle, scaler)
        # scale and terms of a loss that was scaled and whose backward has not run yet
        self.early: tuple[str, Any] | None = None
        self.saved: dict[str, Any] = {}  # the oracle's part of a saved state
        self.skipped = 0  # skipped steps of all optimizers together

    def kind(self, o: int) -> str:
        return self.setup.kinds[o]

    def members(self, o: int) -> list[int]:
        return self.oracle.members[o]

    def may_call(self, o: int) -> bool:
        """Return whether a call with this optimizer is allowed now.

        If it is, the oracle registers the optimizer.
        """
        if not self.oracle.used or not may_meet(self.oracle, o):
            return False
        self.oracle.meet(o)
        return True

    def backward(self, name: str, kind: str, pairs: Any) -> None:
        oracle = self.oracle
        oracle.shown = self.scene.scales()
        oracle.backward(name, lambda: value_of(kind, pairs, oracle.params), {i for i, _ in pairs})

    def see_skip(self, o: int, allowed: set[bool]) -> bool:
        skipped = self.scene["scaler"].last_step(self.scene[f"o{o}"]).skipped
        if skipped not in allowed:
            raise Disagreement("the step was skipped" if skipped else "the step was taken, not skipped")
        return skipped

    def count_skip(self, o: int, skipped: bool) -> None:
        """Compare the scaler's counts of skipped steps with the oracle's."""
        self.skipped += skipped
        scaler = self.scene["scaler"]
        counts = scaler.skipped_steps(self.scene[f"o{o}"]), scaler.skipped_steps()
        right = self.oracle.windows[o].skipped, self.skipped
        if counts != right:
            raise Disagreement(f"skipped_steps() of o{o} and of all are {counts}, should be {right}")

    def clipped(self, owners: list[int], indices: Any, limit: float, norm_type: float) -> float:
        """Clip the true gradients.

        If an overflowed gradient was overwritten, it is not specified whether the clip changes the others.
        """
        oracle = self.oracle
        norm = oracle.norm(indices, norm_type)
        if limit < norm < math.inf and any(True in oracle.seen.skips(o, self.members(o)) for o in owners):
            raise OutOfDomainError("a clip of gradients whose step is skipped")
        return oracle.clip_norm(indices, limit, norm_type)

    def compare_norm(self, norm: float, right: float) -> None:
        if math.isfinite(right):
            same = math.isclose(norm, right, rel_tol=1e-5, abs_tol=1e-30)
        else:
            same = not math.isfinite(norm)
        if not same:
            raise Disagreement(f"the norm is {norm}, it should be {right}")


# -- losses, unscaling and clipping ---------------------------------------------------------------


def backward(run: Run, name: str, pairs: Any, overflow: int | None) -> None:
    """Run ``scale(loss).backward()``, in which a gradient may become infinite or nan."""
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


def unscale(run: Run, o: int) -> None:
    line, oracle = f"scaler.unscale_(o{o})", run.oracle
    if not oracle.used:
        run.scene.run(line, YES, NOT_SCALED_YET)
    elif run.may_call(o) and not run.scene.run(line, error_of_unscale(oracle, o), r"unscale_\(\) (has|is)"):
        oracle.unscale(o, explicit=True)


def ensure_unscaled(run: Run, o: int) -> None:
    if run.may_call(o):
        run.scene.run(f"scaler.core.ensure_unscaled(o{o})")
        run.oracle.unscale(o, explicit=True)


def clip_norm(run: Run, o: int, limit: float, norm_type: float) -> None:
    if run.may_call(o):
        run.scene.run(f"norm = scaler.clip_grad_norm_(o{o}, {limit}, norm_type={norm_type})")
        run.oracle.unscale(o, explicit=False)
        run.compare_norm(run.scene["norm"].item(), run.clipped([o], run.members(o), limit, norm_type))


def clip_norm_of_params(run: Run, indices: Any, limit: float, norm_type: float) -> None:
    call = f"clip_grad_norm_([{params(indices)}], {limit}, norm_type={norm_type})"
    if _clip_params(run, indices, f"norm = scaler.{call}"):
        owners = [o for o in run.oracle.known if set(run.members(o)) & set(indices)]
        run.compare_norm(run.scene["norm"].item(), run.clipped(owners, indices, limit, norm_type))


def clip_value(run: Run, o: int, indices: Any, limit: float) -> None:
    if indices is not None:
        if _clip_params(run, indices, f"scaler.clip_grad_value_([{params(indices)}], {limit})"):
            _clamp(run, indices, limit)
    elif run.may_call(o):
        run.scene.run(f"scaler.clip_grad_value_(o{o}, {limit})")
        run.oracle.unscale(o, explicit=False)
        _clamp(run, run.members(o), limit)


def _clip_params(run: Run, indices: Any, line: str) -> bool:
    """Clip parameters.

    This unscales the gradients of their optimizers, or of the one optimizer that has no other parameters.
    Return whether the clip was accepted.
    """
    oracle = run.oracle
    touched = [o for o in oracle.known if set(run.members(o)) & set(indices)]
    exactly = [o for o in touched if set(run.members(o)) == set(indices)]
    touched = exactly if len(exactly) == 1 else touched
    if not oracle.used:
        return False
    if not all(map(oracle.owners, oracle.present(indices))):
        run.scene.run(line, YES, "belong to no optimizer this scaler knows")
        return False
    run.scene.run(line)
    for o in touched:
        oracle.unscale(o, explicit=False)
    return True


def _clamp(run: Run, indices: Any, limit: float) -> None:
    """Clip the true gradients by value.

    It is not specified whether an inf or nan survives, so read it from the scaler's side.
    """
    for index in run.oracle.present(indices):
        grad, real = run.oracle.params[index].grad, run.scene.params[index].grad
        grad.copy_(torch.where(grad.isfinite(), grad.clamp(-limit, limit), real.double()))


# -- what users do to gradients and weights by hand -----------------------------------------------


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
    """Multiply gradients by a factor, whether they are scaled or not."""
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
    """Return the factor or its inverse, whichever keeps the gradients at a moderate size."""
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
    """Do what users do with unscaled gradients: torch's clipping, or weight decay."""
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


# -- updates, saved states, copies, and which optimizers and parameters there are ------------------


def update(run: Run) -> None:
    if not run.oracle.used:
        run.scene.run("scaler.update()", YES, NOT_SCALED_YET)
        return
    error = error_of_update(run.oracle)
    if may_update(run.oracle) and not run.scene.run("scaler.update()", error, "No inf checks were recorded"):
        run.oracle.update(None)


def set_scale(run: Run, value: float) -> None:
    if run.oracle.used and may_update(run.oracle):
        run.scene.run(f"scaler.update({value})")
        run.oracle.update(value)


def end_iteration(run: Run, call: str) -> None:
    run.scene.run(f"scaler.{call}()")
    run.oracle.end_iteration()


def register(run: Run, o: int) -> None:
    if may_meet(run.oracle, o):
        run.scene.run(f"scaler.register(o{o})")
        run.oracle.meet(o)


def add_param_group(run: Run, o: int, index: int) -> None:
    oracle = run.oracle
    fixed = [other for other, kind in enumerate(run.setup.kinds) if kind == "two_calls"]
    if o in fixed or any(index in run.members(other) for other in (o, *fixed)):
        return
    if o not in oracle.known or may_meet(oracle, o, [index]):
        run.scene.run(f'o{o}.add_param_group({{"params": [p{index}]}})')
        oracle.join(o, index)


def save(run: Run) -> None:
    run.scene.run("saved = scaler.state_dict()")
    run.oracle.end_iteration()
    run.scene.see_state(run.scene["saved"])
    scales = run.oracle.scales
    run.saved = {"skipped": run.skipped, "scales": next(iter(scales.worlds)).scales}


def load(run: Run) -> None:
    if run.saved:
        run.scene.run("scaler.load_state_dict(saved)")
        scales = run.oracle.scales
        scales.load({name: s[:3] for name, s in zip(scales.names, run.saved["scales"], strict=True)})
        run.skipped = run.saved["skipped"]
        for window in run.oracle.windows:  # the counts of the optimizers start again here
            window.skipped = 0


def copy(run: Run, pickled: bool) -> None:
    """Continue with a copy of the scaler. This is allowed only between iterations."""
    if run.early is not None:
        return
    everyone, oracle = range(PARAMS), run.oracle
    run.scene.run(f"for p in ({params(everyone)}): p.grad = None")
    oracle.clear(everyone, zeroed=False)
    way = "pickle.loads(pickle.dumps(scaler))" if pickled else "copy.deepcopy(scaler)"
    if not run.scene.run(f"scaler = {way}", error_of_copy(oracle), "may only be pickled at the beginning"):
        known = sorted(oracle.known)
        oracle.start_anew()
        for o in known:
            register(run, o)
