"""In-place ops under diagnose: the inputs it shows, the advice, and overflows that vanish."""

import math

import pytest
import torch
from torch import nn

from amp_plugin import diagnose


def findings_of(program):
    with diagnose(keep_going=True) as diagnosis:
        program()
    return diagnosis.findings


def half_block(body):
    """Return a program that computes a loss from 16-bit activations and runs backward."""

    def program():
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = body(net(1000 * torch.randn(16, 8)), net)
        loss.backward()

    return program


@pytest.mark.parametrize(
    ("write", "shown"),
    [
        (lambda x: x.add_(6e4), "self fp16[2x3] 59968 to 59968"),
        (lambda x: x.mul_(2), "self fp16[2x3] 59968 to 59968"),
        (lambda x: torch.add(x, x, out=x), "self fp16[2x3] 59968 to 59968"),
        (lambda x: torch._foreach_add_([x], 6e4), "self[0] fp16[2x3] 59968 to 59968"),
    ],
    ids=["add", "mul", "out", "foreach"],
)
def test_the_inputs_are_those_that_the_op_read(write, shown):
    def program():
        x = torch.full((2, 3), 59968.0).half()
        write(x)
        kept.append(x)

    kept = []
    (finding,) = findings_of(program)
    assert str(finding.inputs[0]) == shown
    assert finding.output.inf == 6
    assert all(given.largest < math.inf and not given.inf for given in finding.inputs)


def test_what_is_written_over_is_no_input():
    finding = findings_of(lambda: kept.append(torch.zeros(2).copy_(torch.ones(2)).div_(0)))[0]
    assert [given.name for given in finding.inputs] == ["self"]
    assert (finding.inputs[0].lowest, finding.inputs[0].highest) == (1, 1)


kept = []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_eps_that_is_0_in_fp16_is_a_matter_of_the_optimizer(optimizer, foreach):
    def program():
        torch.manual_seed(0)
        prompt = nn.Parameter(0.1 * torch.randn(4, 8, dtype=torch.float16))
        head = nn.Linear(8, 1).half().requires_grad_(False)
        stepper = optimizer([prompt], lr=1e-2, foreach=foreach)
        for _ in range(3):
            stepper.zero_grad()
            (1e-3 * head(prompt).square().mean()).backward()
            stepper.step()

    finding = findings_of(program)[0]
    assert "the optimizer's eps is 0 in this dtype" in finding.advice
    assert finding.reached.startswith("the weight")


RMS = {
    "pow_": lambda v, h: v.pow_(2),
    "mul_": lambda v, h: v.mul_(h),
    "square_": lambda v, h: v.square_(),
    "of a view": lambda v, h: v[:8].square_(),
}


@pytest.mark.parametrize("name", RMS)
def test_an_overflow_in_place_that_vanishes_is_found(name):
    def body(h, _):
        v = h.clone()
        RMS[name](v, h)
        return (h * torch.rsqrt(v.mean(-1, keepdim=True).abs() + 1e-6)).float().square().mean()

    finding = findings_of(half_block(body))[0]
    assert "made inf" in finding.headline
    assert name == "of a view" or name.strip("_").replace("square", "pow") in finding.op
    assert finding.reached.startswith("a finite result that differs much from fp64")


def test_healthy_writes_in_place_are_left_alone():
    def body(h, net):
        h = (h / 1000).clamp_(-3, 3).add_(1).mul_(0.5)
        gate = torch.sigmoid_(h.clone().mul_(1e4))  # the result is 1 whether exp(-x) overflows or not
        scores = h.clone()
        scores[:, 0] = -math.inf
        return (scores.softmax(-1) * gate).float().sum() + net.bias.sum()

    assert findings_of(half_block(body)) == []
