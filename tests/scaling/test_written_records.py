"""If a program writes into torch's ``_per_optimizer_states``, does it have the same effect as in torch.amp?"""

import copy
import itertools
import math
from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from amp_plugin import GradScaler
from amp_plugin.adapters.takeover import Takeover
from tests.samples import sampled

KINDS = [torch.amp.GradScaler, GradScaler]
VALUES = (1.0, 3.0, math.inf, 2.0, math.inf, 1.0)


class Loop:
    """One weight, its optimizer and a scaler. :attr:`seen` records the weight and the scale."""

    def __init__(self, kind):
        self.kind, self.scaler = kind, kind("cpu", init_scale=64.0, growth_interval=2)
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.25)
        self.seen = []

    @property
    def record(self):
        return self.scaler._per_optimizer_states[id(self.optimizer)]

    def backward(self, value):
        self.weight.grad = None
        self.scaler.scale((self.weight * value).sum()).backward()

    def update(self):
        self.scaler.update()
        self.note()

    def note(self):
        self.seen.append((self.weight.tolist(), self.scaler.get_scale()))


def first_step_of_sam(loop):
    """Set ``stage = STEPPED`` in place of SAM's first step, which no scaler takes."""
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.record["stage"] = OptState.STEPPED
        loop.update()
        loop.backward(1.0)
        loop.scaler.step(loop.optimizer)
        loop.update()


def overflow_in_the_first_step_only(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.record["stage"] = OptState.READY
        loop.backward(2.0)
        loop.scaler.unscale_(loop.optimizer)
        loop.scaler.step(loop.optimizer)
        loop.update()


def stage_ready_and_update_without_step(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.record["stage"] = OptState.READY
        loop.update()


def dropped_batches(loop):
    for i, value in enumerate(VALUES):
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        if i % 2:
            loop.record["stage"] = OptState.READY
            loop.record["found_inf_per_device"] = {}
            continue
        loop.scaler.step(loop.optimizer)
        loop.update()


def dropped_when_not_finite(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        if sum(flag.item() for flag in loop.record["found_inf_per_device"].values()):
            loop.scaler._per_optimizer_states.pop(id(loop.optimizer))
            continue
        loop.scaler.step(loop.optimizer)
        loop.update()


def dropped_by(remove):
    def program(loop):
        for i, value in enumerate(VALUES):
            loop.backward(value)
            loop.scaler.unscale_(loop.optimizer)
            if i % 3 == 1:
                remove(loop.scaler, id(loop.optimizer))
                assert id(loop.optimizer) not in loop.scaler._per_optimizer_states
                assert loop.record["stage"] is OptState.READY
                loop.backward(value)
            loop.scaler.step(loop.optimizer)
            loop.update()

    program.__name__ = remove.__name__
    return program


def cleared(scaler, key):
    scaler._per_optimizer_states.clear()


def popped(scaler, key):
    assert scaler._per_optimizer_states.pop(key)["stage"] is not OptState.READY
    assert scaler._per_optimizer_states.pop(key, None) is None


def deleted(scaler, key):
    del scaler._per_optimizer_states[key]


def assigned(scaler, key):
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def kept_and_put_back(loop):
    """Copy the records before an attempt, and restore them for a retry."""
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        kept = copy.deepcopy(loop.scaler._per_optimizer_states)
        loop.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        loop.scaler._per_optimizer_states = kept
        loop.scaler.step(loop.optimizer)
        loop.update()


def one_record_put_in(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.scaler._per_optimizer_states[id(loop.optimizer)] = _refresh_per_optimizer_state()
        loop.backward(2 * value)
        loop.scaler.step(loop.optimizer)
        loop.update()


def overflows_mended_by_hand(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        for flag in loop.record["found_inf_per_device"].values():
            flag.zero_()
        loop.scaler.step(loop.optimizer)
        loop.update()


def overflows_of_others_after_the_step(loop):
    """Reduce ``found_inf`` between step and update, as ranks do to agree on the scale."""
    for i, value in enumerate(VALUES):
        loop.backward(value)
        loop.scaler.step(loop.optimizer)
        for flag in loop.record["found_inf_per_device"].values():
            flag.fill_(float(i % 2))
        loop.update()


def overflows_replaced_after_the_step(loop):
    for i, value in enumerate(VALUES):
        loop.backward(value)
        loop.scaler.step(loop.optimizer)
        loop.record["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(i % 2))}
        loop.update()


def overflows_of_others_before_the_step(loop):
    for i, value in enumerate(VALUES):
        loop.backward(value)
        loop.scaler.unscale_(loop.optimizer)
        loop.record["found_inf_per_device"][torch.device("cpu")] = torch.tensor(float(i % 3 == 0))
        if i % 3 == 0 or math.isinf(value):
            loop.record["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(1.0)}
        loop.scaler.step(loop.optimizer)
        loop.update()


def two_steps_before_an_update(loop):
    for value in VALUES:
        loop.backward(value)
        loop.scaler.step(loop.optimizer)
        loop.record["stage"] = OptState.READY
        loop.backward(1.0)
        loop.scaler.step(loop.optimizer)
        loop.update()


def read_by_the_id_of_a_wrapper(loop):
    class Wrapper:
        def __init__(self, inner):
            self.param_groups, self.step = inner.param_groups, inner.step

    wrapper = Wrapper(loop.optimizer)
    for value in VALUES:
        loop.backward(value)
        loop.scaler.unscale_(wrapper)
        record = loop.scaler._per_optimizer_states[id(wrapper)]
        loop.seen.append(str(record))
        if value == 3.0:
            record["found_inf_per_device"][torch.device("cpu")].fill_(1.0)
        loop.scaler.step(wrapper)
        loop.seen.append(str(record))
        loop.update()


def unscaled_by_the_program(loop):
    """Run a copy of torch's ``unscale_``, as many programs contain.

    The scaler does not know the optimizer yet.
    """
    for value in VALUES:
        loop.backward(value)
        scaler, record = loop.scaler, loop.record
        scaler._check_scale_growth_tracker("unscale_")
        assert record["stage"] is OptState.READY
        inverse = scaler._scale.double().reciprocal().float()
        found = torch.full((), 0.0)
        record["found_inf_per_device"] = scaler._unscale_grads_(loop.optimizer, inverse, found, False)
        record["stage"] = OptState.UNSCALED
        scaler.step(loop.optimizer)
        loop.update()


def stepped_by_the_program(loop):
    """Run copies of torch's ``step`` and ``update`` in the program."""
    for value in VALUES:
        loop.backward(value)
        scaler, record = loop.scaler, loop.record
        if record["stage"] is OptState.READY:
            scaler.unscale_(loop.optimizer)
        assert len(record["found_inf_per_device"]) == 1
        scaler._maybe_opt_step(loop.optimizer, record)
        record["stage"] = OptState.STEPPED
        scale, tracker = scaler._check_scale_growth_tracker("update")
        states = scaler._per_optimizer_states.values()
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        assert len(found) == 1
        torch._amp_update_scale_(scale, tracker, found[0], 2.0, 0.5, 2)
        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        loop.note()


def seen_by_others(loop):
    """Reading changes nothing. Keys, items and added entries are as in torch."""
    key, sight = id(loop.optimizer), []
    for value in VALUES:
        loop.backward(value)
        states = loop.scaler._per_optimizer_states
        sight.append([key in states, [*states] == [key], len(states)])
        loop.scaler.unscale_(loop.optimizer)
        states[key]["mine"] = value
        sight.extend([*map(str, state.items())] for state in states.values())
        loop.scaler.step(loop.optimizer)
        sight.append(str(sorted(states[key])))
        loop.update()
        sight.append(str(loop.record))
    loop.seen.append(sight)


PROGRAMS = [
    first_step_of_sam,
    overflow_in_the_first_step_only,
    stage_ready_and_update_without_step,
    dropped_batches,
    dropped_when_not_finite,
    *map(dropped_by, (cleared, popped, deleted, assigned)),
    kept_and_put_back,
    one_record_put_in,
    overflows_mended_by_hand,
    overflows_of_others_after_the_step,
    overflows_replaced_after_the_step,
    overflows_of_others_before_the_step,
    two_steps_before_an_update,
    read_by_the_id_of_a_wrapper,
    unscaled_by_the_program,
    stepped_by_the_program,
    seen_by_others,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_written_record_counts_as_in_torch(program):
    seen = []
    for kind in KINDS:
        loop = Loop(kind)
        program(loop)
        seen.append(loop.seen)
        assert loop.seen
    assert seen[1] == seen[0]


def stage_written(scaler, key):
    scaler._per_optimizer_states[key]["stage"] = OptState.READY


def put_in(scaler, key):
    scaler._per_optimizer_states[key] = _refresh_per_optimizer_state()


def multiplied_before(pair, write):
    pair.multiply()
    write()


def multiplied_after(pair, write):
    write()
    pair.multiply()


def divided_twice(pair, write):
    """Leave the gradient as it is. It is divided by the scale a second time."""
    write()


def unscaled_again(pair, write):
    multiplied_after(pair, write)
    pair.scaler.unscale_(pair.optimizers[0])


def added_to(pair, write):
    """Let a second micro-batch add to the gradient that the program has looked at."""
    multiplied_after(pair, write)
    pair.backward(2.0)


def updated(pair, write):
    """Step with the same gradient after an update of the scale."""
    write()
    pair.scaler.step(pair.optimizers[1])
    pair.scaler.update()
    pair.multiply()


def updated_after_a_step(pair, write):
    """Step twice with the same gradient. The record is written between the steps."""
    pair.scaler.step(pair.optimizers[0])
    multiplied_after(pair, write)
    pair.backward(2.0)


class Pair:
    """Two weights with an optimizer each, trained under autocast. Only the first one's record is written."""

    def __init__(self, kind, dtype):
        self.scaler, self.dtype = kind("cpu", init_scale=64.0, growth_interval=2), dtype
        self.weights = [torch.nn.Parameter(torch.ones(1, 4)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([weight], lr=0.25) for weight in self.weights]

    def backward(self, value):
        with torch.autocast("cpu", dtype=self.dtype):
            inputs = torch.full((1, 4), value)
            loss = sum(torch.nn.functional.linear(inputs, weight) for weight in self.weights)
        self.scaler.scale(loss.sum()).backward()

    def multiply(self):
        self.weights[0].grad.mul_(self.scaler.get_scale())

    def train(self, write, afterwards):
        seen = []
        for i, value in enumerate(VALUES):
            self.weights[0].grad = self.weights[1].grad = None
            self.backward(value)
            self.scaler.unscale_(self.optimizers[0])
            if i % 2:
                afterwards(self, lambda: write(self.scaler, id(self.optimizers[0])))
            for optimizer, weight in zip(self.optimizers, self.weights, strict=True):
                self.scaler.step(optimizer)
                seen.append((weight.tolist(), weight.grad.tolist()))
            self.scaler.update()
            seen.append(self.scaler.get_scale())
        return seen


WRITES = (stage_written, put_in, cleared, popped, deleted, assigned)
AFTERWARDS = (
    *(multiplied_before, multiplied_after, divided_twice, unscaled_again, added_to),
    *(updated, updated_after_a_step),
)
# 14 of 84. Each way to write occurs at least twice, and what the program does afterwards twice, in both dtypes.
SAMPLE = [
    (7 * write + afterwards) * 2 + (write + afterwards) // 3 % 2
    for write, afterwards in itertools.product(range(6), range(7))
    if (write + afterwards) % 3 == 0
]


@pytest.mark.parametrize(
    ("write", "afterwards", "dtype"),
    sampled([*itertools.product(WRITES, AFTERWARDS, (torch.float16, torch.bfloat16))], SAMPLE),
)
def test_gradients_that_a_program_keeps_count_as_scaled_again(write, afterwards, dtype):
    """A program unscales, writes READY into the record or removes it, and steps with the same gradient."""
    theirs, ours = (Pair(kind, dtype).train(write, afterwards) for kind in KINDS)
    with Takeover("a test"):
        run = Pair(torch.amp.GradScaler, dtype).train(write, afterwards)
    assert str(ours) == str(run) == str(theirs)  # nan equals nan in strings


def test_the_norm_is_that_of_the_step():
    loop = Loop(GradScaler)
    loop.backward(3.0)
    loop.scaler.unscale_(loop.optimizer)
    loop.record["stage"] = OptState.READY
    loop.scaler.step(loop.optimizer)
    assert loop.scaler.last_step(loop.optimizer).norm.item() == 6.0 / 64.0
