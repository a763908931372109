"""Plays a sequence: each event on the real scaler and on the oracle, then compares them."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import torch

from amp_plugin import GradScaler
from tests.fuzz import prelude
from tests.fuzz.oracle import MAYBE, NO, YES, GaveUpError, Oracle
from tests.fuzz.scale_model import Disagreement, OutOfDomainError
from tests.fuzz.scene import Scene, params, terms, value_of
from tests.fuzz.sequences import PARAMS, Sequence

_EARLY = "Attempted .* but _scale is None"
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


def play(sequence: Sequence, scaler: type[GradScaler] = GradScaler) -> None:
    """Play a sequence.

    Args:
        sequence: What to do.
        scaler: The class that is tested.

    Raises:
        Disagreement: The scaler and the oracle differ; ``program`` is what was run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", message=".*script_method", category=DeprecationWarning
        )  # torch's own
        warnings.filterwarnings("ignore", message=r"update\(\): a scaled loss ran backward")
        player = Player(sequence, scaler)
        try:
            with contextlib.suppress(OutOfDomainError):
                player.play()
        except Disagreement as error:
            raise Disagreement(str(error), "\n".join(player.scene.lines)) from error


class Player:
    """One method for each event; one that means nothing where it stands does nothing."""

    def __init__(self, sequence: Sequence, scaler: type[GradScaler]) -> None:
        self._setup, self._events = sequence
        self._count = len(self._setup.kinds)
        self._oracle = Oracle(self._setup)
        self._early: tuple[str, Any] | None = None
        self._saved: dict[str, Any] | None = None
        self._skipped = 0
        self.scene = Scene(self._setup, self._oracle, scaler)
        for o in range(self._count):
            if self._setup.registered[o]:
                self.register(o)

    def play(self) -> None:
        """Play all events, and look after each."""
        for name, args in self._events:
            getattr(self, name)(*args)
            self.scene.look()
        self.scene.compare_weights()

    # -- what is there --------------------------------------------------------------------------

    def _kind(self, o: int) -> str:
        return self._setup.kinds[o]

    def _members(self, o: int) -> list[int]:
        return self._oracle.members[o]

    def _ready(self, o: int, *, meet: bool = True) -> bool:
        """Whether a call on an optimizer has a meaning: something was scaled, and it may be met."""
        if not self._oracle.used or self._kind(o) == "takes_gradients" or not self._oracle.may_meet(o):
            return False
        if meet:
            self._oracle.meet(o)
        return True

    # -- losses ---------------------------------------------------------------------------------

    def backward(self, name: str, pairs: Any, overflow: int | None) -> None:
        """``scale(loss).backward()``; perhaps with a gradient that is not finite."""
        pairs = [(i, math.inf if i == overflow else factor) for i, factor in pairs]
        self.scene.run(f"scaler.scale(loss({terms(pairs)}){_named(name)}).backward()")
        self._oracle.scale(name)
        self._backward(name, "loss", pairs)

    def _backward(self, name: str, kind: str, pairs: Any) -> None:
        oracle = self._oracle
        scaler = self.scene["scaler"]
        oracle.shown = {each: scaler.get_scale(each or None) for each in oracle.scales.names}
        oracle.backward(name, lambda: value_of(kind, pairs, oracle.params), {i for i, _ in pairs})
        for o in range(self._count):
            if self._kind(o) == "takes_gradients":
                for index in self._members(o):
                    oracle.params[index].grad = None

    def scale_early(self, name: str, pairs: Any) -> None:
        """Scale a loss whose backward comes later."""
        self.scene.run(f"early = scaler.scale(linear({terms(pairs)}){_named(name)})")
        self._oracle.scale(name)
        self._early = (name, pairs)

    def backward_early(self) -> None:
        """The backward of a loss that was scaled before."""
        if self._early is not None:
            self.scene.run("early.backward(); del early")
            (name, pairs), self._early = self._early, None
            self._backward(name, "linear", pairs)

    def regularise(self, o: int) -> None:
        """Add the gradient of a loss that is not scaled to unscaled gradients."""
        members = self._members(o)
        if self._oracle.unscaled_window(members) and self._oracle.present(members) == members:
            pairs = [(i, 0.5) for i in members]
            self.scene.run(f"linear({terms(pairs)}).backward()")
            for index in members:
                self._oracle.edit(index, lambda grad: grad.add_(0.5))

    # -- the user's hands -----------------------------------------------------------------------

    def zero_grad(self, o: int, set_to_none: bool) -> None:
        """``optimizer.zero_grad``."""
        o %= self._count
        self.scene.run(f"o{o}.zero_grad(set_to_none={set_to_none})")
        self._oracle.clear(self._members(o), zeroed=not set_to_none)

    def drop_one(self, index: int) -> None:
        """Drop the gradient of one parameter."""
        if self._oracle.present([index]):
            self.scene.run(f"p{index}.grad = None")
            self._oracle.clear([index], zeroed=False)

    def edit(self, o: int, kind: str, factor: float, wanted: Any) -> None:
        """Multiply gradients, in whatever unit they are."""
        o %= self._count
        members = self._oracle.present(self._members(o))
        indices = members if kind == "collective" else [i for i in wanted if i in members]
        if not indices or not all(map(self._oracle.may_edit, indices)):
            return
        factor = self._moderate(indices, factor)
        if kind == "collective":
            self.scene.run(f"collective({factor}, {', '.join(f'p{i}.grad' for i in indices)})")
        for index in indices:
            if kind != "collective":
                self.scene.run(_EDITS[kind].format(p=f"p{index}", factor=factor))
            self._oracle.edit(index, lambda grad: grad.mul_(factor), replaced=kind == "replaced")

    def _moderate(self, indices: list[int], factor: float) -> float:
        """The factor or its inverse, whichever keeps gradients in the middle."""
        largest = max(self._oracle.params[i].grad.abs().max().item() for i in indices)
        return 1.0 / factor if (factor > 1.0) == (largest > 1e3) else factor

    def inject(self, index: int, value: str, kind: str) -> None:
        """Write inf or nan into a gradient."""
        if self._oracle.may_edit(index):
            self.scene.run(_INJECTIONS[kind].format(p=f"p{index}", value=value))

            def write(grad: torch.Tensor) -> None:
                grad[0] = float(value)

            self._oracle.edit(index, write, replaced=kind == "replaced")

    def repair(self, index: int) -> None:
        """Write 0 over what is not finite."""
        if self._oracle.may_edit(index):
            self.scene.run(f"p{index}.grad.nan_to_num_(0.0, 0.0, 0.0)")
            self._oracle.edit(index, lambda grad: grad.nan_to_num_(0.0, 0.0, 0.0))

    def edit_unscaled(self, o: int, kind: str) -> None:
        """What users do with unscaled gradients: torch's clipping, weight decay by hand."""
        o %= self._count
        oracle, members = self._oracle, self._oracle.present(self._members(o))
        if not members or not oracle.unscaled_window(members) or not oracle.finite(members):
            return
        if kind == "decay":
            self._decay(o)
            return
        call, limit = ("clip_grad_norm_", 1.0) if kind == "torch norm" else ("clip_grad_value_", 0.5)
        self.scene.run(f"torch.nn.utils.{call}([{params(members)}], {limit})")
        getattr(torch.nn.utils, call)([oracle.params[i] for i in members], limit)
        for index in members:
            oracle.edit(index, lambda grad: None)

    def _decay(self, o: int, *, run: bool = True) -> None:
        for index in self._oracle.present(self._members(o)):
            if run:
                self.scene.run(f"p{index}.grad.add_(p{index}.detach().abs(), alpha=0.1)")
            decay = 0.1 * self._oracle.params[index].detach().abs()
            self._oracle.edit(index, lambda grad: grad.add_(decay))

    def swap(self, index: int) -> None:
        """``torch.utils.swap_tensors``, as ``module.double()`` does where asked to."""
        owners = [self._kind(o) for o in range(self._count) if index in self._members(o)]
        if not self._oracle.present([index]) and self._early is None and "takes_gradients" not in owners:
            self.scene.run(f"torch.utils.swap_tensors(p{index}, Parameter(p{index}.detach().clone()))")

    # -- unscaling and clipping -----------------------------------------------------------------

    def unscale(self, o: int) -> None:
        """``unscale_``."""
        o %= self._count
        if not self._oracle.used:
            self.scene.run(f"scaler.unscale_(o{o})", YES, _EARLY)
        elif self._ready(o) and not self.scene.run(
            f"scaler.unscale_(o{o})", self._oracle.error_of_unscale(o), r"unscale_\(\) (has|is)"
        ):
            self._oracle.unscale(o, explicit=True)

    def ensure_unscaled(self, o: int) -> None:
        """``ensure_unscaled``."""
        o %= self._count
        if self._ready(o):
            self.scene.run(f"scaler.ensure_unscaled(o{o})")
            self._oracle.unscale(o, explicit=True)

    def clip_norm(self, o: int, limit: float, norm_type: float, fold: bool) -> None:
        """``clip_grad_norm_(optimizer)``."""
        o %= self._count
        if self._ready(o):
            folded = ", fold=True" if fold else ""
            self.scene.run(f"norm = scaler.clip_grad_norm_(o{o}, {limit}, norm_type={norm_type}{folded})")
            if fold:
                self._oracle.fold(o)
            else:
                self._oracle.unscale(o, explicit=False)
            self._compare_norm(self._oracle.clip_norm(self._members(o), limit, norm_type))

    def clip_norm_of_params(self, indices: Any, limit: float, norm_type: float, fold: bool) -> None:
        """``clip_grad_norm_(parameters)``."""
        folded = ", fold=True" if fold else ""
        call = f"clip_grad_norm_([{params(indices)}], {limit}, norm_type={norm_type}{folded})"
        if self._clip_params(indices, f"norm = scaler.{call}"):
            self._compare_norm(self._oracle.clip_norm(indices, limit, norm_type))

    def clip_value(self, o: int, indices: Any, limit: float) -> None:
        """``clip_grad_value_`` of an optimizer or of parameters."""
        o %= self._count
        if indices is not None:
            clipped = self._clip_params(indices, f"scaler.clip_grad_value_([{params(indices)}], {limit})")
        else:
            indices, clipped = self._members(o), self._ready(o)
            if clipped:
                self.scene.run(f"scaler.clip_grad_value_(o{o}, {limit})")
                self._oracle.unscale(o, explicit=False)
        if clipped:
            self._clamp(indices, limit)

    def _clip_params(self, indices: Any, line: str) -> bool:
        oracle = self._oracle
        if not oracle.used:
            return False
        if not all(map(oracle.owners, oracle.present(indices))):
            self.scene.run(line, YES, "belong to no optimizer this scaler knows")
            return False
        self.scene.run(line)
        for o in sorted(oracle.known):
            if set(self._members(o)) & set(indices):
                oracle.unscale(o, explicit=False)
        return True

    def _clamp(self, indices: Any, limit: float) -> None:
        """Clip true gradients by value; whether inf or nan was there is not promised, so look."""
        for index in self._oracle.present(indices):
            grad, real = self._oracle.params[index].grad, self.scene.params[index].grad
            clamped = grad.clamp(-limit, limit)
            grad.copy_(torch.where(grad.isfinite(), clamped, real.double()))

    def _compare_norm(self, right: float) -> None:
        norm = self.scene["norm"].item()
        if math.isfinite(right) != math.isfinite(norm) or (
            math.isfinite(right) and not math.isclose(norm, right, rel_tol=1e-5, abs_tol=1e-30)
        ):
            raise Disagreement(f"the norm is {norm}, it should be {right}")

    # -- steps ----------------------------------------------------------------------------------

    def step(self, o: int) -> None:
        """``step(optimizer)``."""
        o %= self._count
        oracle = self._oracle
        if self._kind(o) == "takes_gradients":
            self._step_without_gradients(o)
        elif self._kind(o) in prelude.NEED_CLOSURE:
            self.closure(o, tuple((i, 2.0) for i in self._members(o)), True, "", None, oracle.scales.names[0])
        elif not oracle.used:
            self.scene.run(f"scaler.step(o{o})", YES, _EARLY)
        elif self._ready(o):
            refused, text = oracle.error_of_step(o), "gradients were changed|already been called"
            undoes = self._kind(o) == "counting" and self._setup.options.get("sync_free")
            if self.scene.run(f"scaler.step(o{o})", MAYBE if undoes else refused, f"{text}|sync_free=True"):
                if undoes:
                    raise OutOfDomainError
                return
            allowed = oracle.check(o, write=not oracle.fused[o])
            skipped = self._seen_skip(o, allowed)
            oracle.step(o, skipped)
            self._count_skips(o, skipped)
            self.scene.compare_weights()

    def _step_without_gradients(self, o: int) -> None:
        """A scaled backward reached the parameters, but no gradient is there: an error, not a step."""
        reached = self._oracle.windows[o].fresh == YES
        if self._oracle.used and self.scene.run(f"scaler.step(o{o})", YES if reached else MAYBE):
            raise OutOfDomainError
        self.scene.compare_weights()

    def _seen_skip(self, o: int, allowed: set[bool]) -> bool:
        skipped = self.scene["scaler"].last_step(self.scene[f"o{o}"]).skipped
        if skipped not in allowed:
            raise Disagreement("the step was skipped" if skipped else "the step was taken, not skipped")
        return skipped

    def _count_skips(self, o: int, skipped: bool) -> None:
        self._skipped += skipped
        scaler = self.scene["scaler"]
        counts = scaler.skipped_steps(self.scene[f"o{o}"]), scaler.skipped_steps()
        right = self._oracle.windows[o].skipped, self._skipped
        if counts != right:
            raise Disagreement(f"skipped_steps() of o{o} and of all are {counts}, should be {right}")

    def raw_step(self, o: int) -> None:
        """``optimizer.step()`` past the scaler, on unscaled gradients."""
        o %= self._count
        members, oracle = self._members(o), self._oracle
        if self._kind(o) in (*prelude.NEED_CLOSURE, "takes_gradients") or o not in oracle.known:
            return
        if oracle.unscaled_window(members) and oracle.finite(members):
            self.scene.run(f"o{o}.step()")
            oracle.optimizers[o].step()
            self.scene.compare_weights()

    # -- steps with a closure -------------------------------------------------------------------

    def closure(
        self, o: int, pairs: Any, zero: bool | None, kind: str, overflow: int | None, name: str
    ) -> None:
        """``step(optimizer, closure)``."""
        o %= self._count
        if self._kind(o) == "takes_gradients" or self._setup.compiled or not self._oracle.may_meet(o):
            return
        bowl = "bowl" if self._kind(o) == "lbfgs" else "loss"
        own = self._members(o)
        pairs = [*((i, f) for i, f in pairs if i in own or bowl == "loss")]
        pairs += [(i, 1.0) for i in own if i not in dict(pairs)]
        zero = zero if zero is not None or bowl == "loss" else True
        factors = [math.inf if call == overflow else 1.0 for call in range(6)]
        self._oracle.meet(o)
        self.scene.run(_closure_lines(o, own, bowl, pairs, zero, kind, factors, name))
        calls = len(factors) - len(self.scene["factors"])
        self._mirror_closure(o, bowl, pairs, zero, kind, factors, name, calls)

    def _mirror_closure(
        self, o: int, bowl: str, pairs: Any, zero: bool | None, kind: str, factors: Any, name: str, calls: int
    ) -> None:
        oracle, scaler = self._oracle, self.scene["scaler"]
        skipped = scaler.last_step(self.scene[f"o{o}"]).skipped
        made = 0
        if calls == 0:  # overflow before the first call
            self._seen_skip(o, oracle.check(o) if skipped else {True})
            gave_up = True
        else:
            if self._kind(o) in {"third_party", "counting", "two_calls"} and oracle.windows[o].fresh != NO:
                self._look_first(o)

            def closure() -> torch.Tensor:
                nonlocal made
                weighted = [(i, factor * factors[made]) for i, factor in pairs]
                made += 1
                if zero is not None:
                    oracle.clear(self._members(o), zeroed=not zero)
                oracle.scale(name)
                self._backward(name, bowl, weighted)
                self._edit_in_closure(o, kind, bowl)
                found = oracle.check(o)
                oracle.unscale(o, explicit=True)
                if found == {True} or (True in found and skipped and made == calls):
                    raise GaveUpError
                return value_of(bowl, weighted, oracle.params)

            gave_up = oracle.run_closure(o, closure)
            if (made, gave_up) != (calls, skipped):
                what = f"{calls} calls of the closure, skipped={skipped}"
                raise Disagreement(f"{what}; it should have been {made}, skipped={gave_up}")
        oracle.close(o, gave_up)
        self._count_skips(o, gave_up)
        self.scene.compare_weights(rtol=1e-2 if bowl == "bowl" else 1e-3)
        if gave_up:
            self.zero_grad(o, set_to_none=True)
        elif bowl == "bowl":
            self.scene.take_gradients(oracle.present(self._members(o)))

    def _look_first(self, o: int) -> None:
        """Optimizers that may look at gradients before they call the closure have them checked there."""
        if False not in self._oracle.check(o):
            raise Disagreement("the closure was called although gradients had overflowed before")
        self._oracle.unscale(o, explicit=True)

    def _edit_in_closure(self, o: int, kind: str, bowl: str) -> None:
        oracle, members = self._oracle, self._members(o)
        if kind:
            oracle.unscale(o, explicit=kind in {"ensure", "decay"})
        limit = _limit(bowl)
        if kind == "clip norm":
            oracle.clip_norm(members, limit, 2.0)
        elif kind == "clip value":
            for index in oracle.present(members):
                oracle.params[index].grad.clamp_(-limit, limit)
        elif kind == "decay":
            self._decay(o, run=False)

    # -- updates and states ---------------------------------------------------------------------

    def update(self) -> None:
        """``update()``."""
        if not self._oracle.used:
            self.scene.run("scaler.update()", YES, _EARLY)
        elif self._oracle.may_update():
            self.scene.run("scaler.update()")
            self._oracle.update(None)

    def set_scale(self, value: float) -> None:
        """``update(new_scale)``."""
        if self._oracle.used and self._oracle.may_update():
            self.scene.run(f"scaler.update({value})")
            self._oracle.update(value)

    def end_iteration(self) -> None:
        """``end_iteration``."""
        self.scene.run("scaler.end_iteration()")
        self._oracle.end_iteration()

    def register(self, o: int) -> None:
        """``register``."""
        o %= self._count
        if self._oracle.may_meet(o):
            self.scene.run(f"scaler.register(o{o})")
            self._oracle.meet(o)

    def add_param_group(self, o: int, index: int) -> None:
        """``optimizer.add_param_group``."""
        o %= self._count
        fixed = {"lbfgs", "two_calls", "takes_gradients"}
        takers = {
            i for other in range(self._count) if self._kind(other) in fixed for i in self._members(other)
        }
        if self._kind(o) in fixed or self._setup.compiled or index in {*self._members(o), *takers}:
            return
        if o not in self._oracle.known or self._oracle.may_meet(o, [index]):
            self.scene.run(f'o{o}.add_param_group({{"params": [p{index}]}})')
            self._oracle.join(o, index)

    def save(self) -> None:
        """``state_dict``."""
        self.scene.run("saved = scaler.state_dict()")
        self._oracle.end_iteration()
        self.scene.see_state(self.scene["saved"])
        rule = self._oracle.scales
        self._saved = {
            "skipped": self._skipped,
            "rule": (rule.growth_factor, rule.backoff_factor, rule.growth_interval),
            "scales": next(iter(rule.worlds)).scales,
        }

    def load(self) -> None:
        """``load_state_dict`` of a state saved before."""
        if self._saved is not None:
            self.scene.run("scaler.load_state_dict(saved)")
            rule = self._oracle.scales
            rule.load({name: s[:2] for name, s in zip(rule.names, self._saved["scales"], strict=True)})
            rule.growth_factor, rule.backoff_factor, rule.growth_interval = self._saved["rule"]
            self._skipped = self._saved["skipped"]

    def set_rule(self, name: str, value: float) -> None:
        """``set_growth_factor`` and its like; they are the default scale's."""
        if len(self._oracle.scales.names) == 1 and self._setup.options.get("dynamic", True):
            self.scene.run(f"scaler.set_{name}({value})")
            setattr(self._oracle.scales, name, value)

    def copy(self, pickled: bool) -> None:
        """Go on with a copy, between iterations."""
        if self._early is None:
            self._clear_all()
            way = "pickle.loads(pickle.dumps(scaler))" if pickled else "copy.deepcopy(scaler)"
            refused = self._oracle.error_of_copy()
            if not self.scene.run(f"scaler = {way}", refused, "may only be pickled at the beginning"):
                self._start_anew()

    def restart(self) -> None:
        """Go on with a new scaler that has loaded the old one's state."""
        if self._early is None:
            self._clear_all()
            self.scene.run("state = scaler.state_dict()")
            self._oracle.end_iteration()
            self.scene.see_state(self.scene["state"])
            self.scene.make_scaler(self._setup)
            self.scene.run("scaler.load_state_dict(state)")
            self._start_anew()

    def _clear_all(self) -> None:
        everyone = range(PARAMS)
        self.scene.run(f"for p in ({params(everyone)}): p.grad = None")
        self._oracle.clear(everyone, zeroed=False)

    def _start_anew(self) -> None:
        known = sorted(self._oracle.known)
        self._oracle.copied()
        self._oracle.scales.copied()
        self._oracle.used.clear()
        for o in known:
            self.register(o)


def _named(name: str) -> str:
    return f", name={name!r}" if name else ""


def _limit(bowl: str) -> float:
    """Where a closure clips; far out for LBFGS, which learns nothing from gradients of one length."""
    return 50.0 if bowl == "bowl" else 0.5


def _closure_lines(
    o: int, own: list[int], bowl: str, pairs: Any, zero: bool | None, kind: str, factors: Any, name: str
) -> str:
    lines = [f"factors = {factors}", "def closure():"]
    if zero is not None:
        lines.append(f"    o{o}.zero_grad(set_to_none={zero})")
    lines.append(f"    value = {bowl}({terms(pairs)}) * factors.pop(0)")
    lines.append(f"    scaler.scale(value{_named(name)}).backward()")
    if kind == "clip norm":
        lines.append(f"    scaler.clip_grad_norm_(o{o}, {_limit(bowl)})")
    elif kind == "clip value":
        lines.append(f"    scaler.clip_grad_value_(o{o}, {_limit(bowl)})")
    elif kind in {"ensure", "decay"}:
        lines.append(f"    scaler.ensure_unscaled(o{o})")
    if kind == "decay":
        lines += [f"    p{i}.grad.add_(p{i}.detach().abs(), alpha=0.1)" for i in own]
    return "\n".join([*lines, "    return value", f"scaler.step(o{o}, closure)"])
