"""Does every rule step as its reference says, in every storage format of weights and states?"""

import itertools

import pytest
import torch

from amp_plugin.kernels import reference
from amp_plugin.kernels.state_codes import decode, encode
from tests.kernels.test_weight_ops import pair_of

OP = torch.ops.amp_plugin
NUMBERS = {
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "decoupled": 1.0,
    "maximize": 1.0,
    "momentum": 0.8,
    "dampening": 0.1,
    "nesterov": 1.0,
    "alpha": 0.95,
    "rho": 0.9,
    "lr_decay": 0.02,
    "momentum_decay": 4e-3,
    "correction2": 0.4,
    "share": 0.3,
    "y_step": -0.004,
    "step": 7.0,
    "ratio": 1.7,
}
SIZES = (0, 1, 17, 128, 1000)
FORMS = ["fp32", "bf16", "8bit"]


def some(seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * factor for size in SIZES]


def stored(state, kind, form):
    """Return a float32 state in a storage format."""
    if kind == "weight" or form == "fp32":
        return state
    return state.bfloat16() if form == "bf16" else encode(state, signed=kind == "signed")


def widened(state, kind, like):
    if state.dtype is torch.uint8:
        return decode(state, like.numel(), signed=kind == "signed").double()
    return state.double()


def tensors_of(name, weights, form, grad_dtype):
    """Return the lists that the op takes.

    Averages of gradients are consistent with the averages of their squares.
    """
    rule = reference.RULES[name]
    params, grads = some(0), [grad.to(grad_dtype) for grad in some(1, 8.0)]
    averages = some(2, 0.1)
    states = []
    for number, kind in enumerate(rule.states):
        values = averages if kind == "signed" else some(3 + number)
        if kind.endswith("square"):
            values = [
                value.square() + average.square() for value, average in zip(values, averages, strict=True)
            ]
        states += [stored(value, kind, form) for value in values]
    counters = [torch.tensor(4.0 + i % 3) for i in range(len(SIZES))] if rule.counters else []
    counters += [torch.tensor(0.5)] * (rule.counters == 2) * len(SIZES)
    remainders = []
    if weights == "pair":
        params, remainders = map(list, zip(*(pair_of(OP, param) for param in params), strict=True))
    return params, grads, states, [counter.clone() for counter in counters], remainders


def values_of(name, lists):
    """Return the results of a step in float64: parameters, states, counters."""
    params, _, states, counters, remainders = lists
    kinds = [kind for kind in reference.RULES[name].states for _ in params]
    if remainders:
        wholes = [torch.empty_like(param, dtype=torch.float32) for param in params]
        OP.unpack_weights_(params, remainders, wholes)
        params = wholes
    likes = itertools.cycle(params)
    return (
        [param.double() for param in params],
        [widened(state, kind, next(likes)) for state, kind in zip(states, kinds, strict=True)],
        [counter.item() for counter in counters],
    )


def copied(lists):
    return [[tensor.clone() for tensor in part] for part in lists]


def close_to(got, right, relative):
    """Return whether numbers agree, relative to the largest one."""
    return all(
        ((mine - true).abs() <= relative * true.abs().max().clamp(min=1e-30)).all()
        for mine, true in zip(got, right, strict=True)
        if true.numel()
    )


# relative to the largest: one unit of the format
STATE_TOLERANCE = {"fp32": 1e-6, "bf16": 2.0**-7, "8bit": 0.02}


@pytest.mark.native
@pytest.mark.parametrize("name", reference.RULES)
@pytest.mark.parametrize("weights", ["fp32", "pair"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_is_that_of_the_reference_in_float64(name, weights, form, scaled):
    numbers = [NUMBERS[number] for number in reference.RULES[name].numbers]
    late = {"grad_scale": torch.tensor(3.7)} if scaled else {}
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        before = tensors_of(name, weights, form, grad_dtype)
        ours, right = copied(before), copied(before)
        OP.step_(*ours, name, numbers, **late)
        reference.step_(*right, name, numbers, **late)
        params, states, counters = values_of(name, ours)
        true_params, true_states, true_counters = values_of(name, right)
        assert close_to(params, true_params, 1e-6)
        assert close_to(states, true_states, STATE_TOLERANCE[form])
        assert counters == true_counters
        assert all(map(torch.equal, ours[1], right[1])), "gradients are left divided alike"
        assert not all(map(torch.equal, ours[0][3:], before[0][3:])), "the step has stepped"


@pytest.mark.native
@pytest.mark.parametrize("name", reference.RULES)
@pytest.mark.parametrize("form", FORMS)
def test_a_poisoned_batch_changes_gradients_alone(name, form):
    numbers = [NUMBERS[number] for number in reference.RULES[name].numbers]
    late = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(1.0)}
    for weights in ("fp32", "pair"):
        before = tensors_of(name, weights, form, torch.float32)
        before[1][-1][3] = torch.inf
        ours = copied(before)
        OP.step_(*ours, name, numbers, **late)
        for part in (0, 2, 3, 4):
            assert all(map(torch.equal, ours[part], before[part]))
        assert all(torch.equal(mine, grad / 2) for mine, grad in zip(ours[1], before[1], strict=True))


@pytest.mark.native
@pytest.mark.parametrize("name", [name for name, rule in reference.RULES.items() if "square" in rule.states])
@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_squares_are_rounded_without_bias(name, form):
    """The mean of many steps from the same start is the float32 result."""
    rule, count = reference.RULES[name], len(SIZES)
    numbers = [NUMBERS[number] for number in rule.numbers]
    params, grads, states, counters, _ = tensors_of(name, "fp32", form, torch.float32)
    before = [params[-1:], grads[-1:], states[count - 1 :: count], counters[count - 1 :: count], []]
    decoded = [
        widened(state, kind, params[-1]).float() for state, kind in zip(before[2], rule.states, strict=True)
    ]
    at = rule.states.index("square")

    def square_after(step, lists):
        """Return the state in float64 after a step with this number."""
        if rule.counters:
            lists[3][0].fill_(step)
        else:
            numbers[rule.numbers.index("step")] = step
        OP.step_(*lists, name, numbers)
        return widened(lists[2][at], "square", params[-1])

    draws = 400
    mean = sum(square_after(1000.0 + step, copied(before)) for step in range(draws)) / draws
    exact = square_after(1000.0, copied([*before[:2], decoded, *before[3:]]))
    assert (mean - exact).mean().abs() < 2e-3 * exact.mean()
    assert ((mean - exact).abs() <= 0.1 * exact.max()).all()
