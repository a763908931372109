"""Do programs that depend on details of torch's scaler find the same details in ours?"""

import pytest
import torch

from amp_plugin import GradScaler

KINDS = [torch.amp.GradScaler, GradScaler]


class Duck:
    """Has ``param_groups``, created at each access, and ``step()``.

    It has no state, no hash and no weak references.
    """

    __slots__ = ("lr", "params", "steps")
    __hash__ = None

    def __init__(self, params):
        self.params, self.lr, self.steps = list(params), 0.5, 0

    @property
    def param_groups(self):
        return [{"params": list(self.params), "lr": self.lr}]

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for param in self.params:
                param.sub_(self.lr * param.grad)


class Forwarding:
    """Forwards attributes to the object that it wraps, including the list of hooks, as fastai's OptimWrapper
    does.
    """

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class PlainDictOfHooks(torch.optim.SGD):
    """Keeps its hooks in a plain dict, as wrappers do that do not call torch's constructor."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self._optimizer_step_pre_hooks = {}


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def forwarding(params):
    return Forwarding(sgd(params))


def train(scaler, make=sgd, values=(1.0, 3.0, float("inf"), 2.0), clips=False, dtype=torch.float32):
    """Train one weight. Return the weight, and the scale after each step."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer, seen = make([weight]), []
    for value in values:
        weight.grad = None
        scaler.scale((weight.float() * value).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((weight.tolist(), scaler.get_scale()))
    return seen


def both(make_scaler, **options):
    theirs, ours = (train(make_scaler(kind), **options) for kind in KINDS)
    assert ours == theirs
    return ours


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [Duck, forwarding, PlainDictOfHooks])
def test_what_has_groups_and_a_step_is_an_optimizer(make, clips):
    both(lambda kind: kind("cpu", init_scale=4.0), make=make, clips=clips)


@pytest.mark.parametrize("make", [Duck, forwarding])
def test_it_also_is_one_without_a_loss_scale(make):
    both(lambda kind: kind("cpu", enabled=False), make=make, values=(1.0, 3.0))


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_an_overridden_unscale_is_called_by_step(clips, is_set):
    def make(kind):
        def unscale_(self, optimizer):
            kind.unscale_(self, optimizer)
            calls.append(kind)
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)  # another rank has overflowed

        if not is_set:
            return type("Reducing", (kind,), {"unscale_": unscale_})("cpu", init_scale=4.0)
        scaler = kind("cpu", init_scale=4.0)
        scaler.unscale_ = unscale_.__get__(scaler)
        return scaler

    calls = []
    seen = both(make, clips=clips)
    assert seen[-1][0] == [1.0] * 4, "every step is skipped"
    assert calls.count(KINDS[0]) == calls.count(KINDS[1]) == 4


@pytest.mark.parametrize("name", ["step", "unscale_", "_unscale_grads_", "_maybe_opt_step"])
def test_clip_and_step_calls_what_is_overridden(name):
    def own(self, *args, **kwargs):
        calls.append(name)
        return getattr(GradScaler, name)(self, *args, **kwargs)

    calls, weight = [], torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = type("Own", (GradScaler,), {name: own})("cpu", init_scale=4.0)
    scaler.scale((3.0 * weight).sum()).backward()
    result = scaler.clip_and_step(optimizer, 0.5)
    assert calls == [name]
    assert (weight.item(), result.skipped, result.norm.item()) == (pytest.approx(0.5, rel=1e-5), False, 3.0)


@pytest.mark.parametrize("clips", [False, True])
def test_a_replaced_unscale_grads_decides_about_float16(clips):
    def make(kind):
        scaler = kind("cpu", init_scale=4.0)
        original = scaler._unscale_grads_
        scaler._unscale_grads_ = lambda optimizer, inverse, found, _: original(
            optimizer, inverse, found, True
        )
        return scaler

    both(make, clips=clips, dtype=torch.float16)


def test_a_subclass_of_unscale_grads_finds_overflows():
    def make(kind):
        def _unscale_grads_(self, *args):
            return {device: found + 1 for device, found in kind._unscale_grads_(self, *args).items()}

        return type("Finding", (kind,), {"_unscale_grads_": _unscale_grads_})("cpu", init_scale=4.0)

    assert both(make)[-1] == ([1.0] * 4, 0.25)


@pytest.mark.parametrize("clips", [False, True])
def test_an_overridden_maybe_opt_step_takes_the_step(clips):
    def make(kind):
        def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
            calls.append(
                (kind, state["stage"].name, sum(f.item() for f in state["found_inf_per_device"].values()))
            )
            if len(calls) % 4 == 2:
                return None
            return kind._maybe_opt_step(self, optimizer, state, *args, **kwargs)

        return type("Retrying", (kind,), {"_maybe_opt_step": _maybe_opt_step})("cpu", init_scale=4.0)

    calls = []
    both(make, clips=clips)
    assert [call[1:] for call in calls[:4]] == [call[1:] for call in calls[4:]]
