"""diagnose names the op, the line and a cure, and ignores programs that are right."""

import contextlib
import json
import math
import pickle
import re
import threading
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from amp_plugin import GradScaler, autocast, diagnose
from amp_plugin.numerics.finding import NonFiniteError
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Argument, Call, Region, traits_of
from amp_plugin.numerics.watch import judge

HERE = Path(__file__).name


def found(program, **options):
    """Run a program under diagnose. Return the finding that ends it, or None."""
    try:
        with diagnose(**options) as diagnosis:
            program()
    except NonFiniteError as error:
        return error.finding
    assert diagnosis.findings == []
    return None


def line_of(finding) -> str:
    assert finding.place is not None
    assert finding.place.file.endswith(HERE)
    return finding.place.text


class Attention(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query, self.scale = nn.Linear(16, 16), scale

    def forward(self, x):
        query = self.query(x) * self.scale
        scores = query @ query.transpose(-1, -2)
        return scores.softmax(-1) @ x


class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.attention, self.out = Attention(scale), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.attention(x).mean(1))


def loss_of(model, scale=1.0, dtype=torch.float16):
    with autocast("cpu", dtype=dtype):
        return functional.cross_entropy(model(scale * torch.randn(2, 5, 16)), torch.tensor([0, 1]))


def test_an_fp16_product_that_overflows_is_named_though_softmax_made_the_nan():
    torch.manual_seed(0)
    finding = found(lambda: loss_of(Net(scale=1000.0)).backward())
    assert (finding.op, finding.kind, finding.direction) == ("aten::bmm.default", "made", "forward")
    assert finding.module == "Net.attention"
    assert line_of(finding) == "scores = query @ query.transpose(-1, -2)"
    assert finding.dtype is torch.float16
    assert finding.inputs[0].largest > 100
    assert finding.output.inf
    assert finding.reached.startswith("nan in aten::_softmax.default at ")
    assert "divides q by sqrt(d)" in finding.advice
    assert "give aten::matmul and aten::bmm the rule fp32" in finding.advice


def test_a_loss_scale_that_comes_down_is_no_fault_and_one_that_never_does_is():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps, scale):
        scaler = GradScaler("cpu", init_scale=scale)
        for _ in range(steps):
            with autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(3, 4)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler

    skipped = []
    assert found(lambda: skipped.append(train(12, 2.0**20).skipped_steps())) is None
    assert skipped[0] > 2
    assert "in the last 20 backward passes" in found(lambda: train(30, 2.0**60)).reached
    assert "in the last backward pass" in found(lambda: train(1, 2.0**60)).reached
    assert found(lambda: train(12, 2.0**20), strict=True).direction == "backward"


def test_a_step_that_overflows_a_weight():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)

    def program():
        for _ in range(3):
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()

    finding = found(program)
    assert finding.reached.startswith("the weight Linear.weight, written by aten::")
    assert "Lower the learning rate" in finding.advice


def test_room_for_a_backward_pass_that_is_written_in_parts():
    logits = torch.zeros(6, 2, 5, requires_grad=True)
    targets, lengths = torch.ones(2, 4, dtype=torch.int64), torch.tensor([1, 4])
    torch.use_deterministic_algorithms(True)  # this setting fills new memory with nan
    try:
        with diagnose():
            steps = torch.tensor([6, 6])
            loss = nn.functional.ctc_loss(logits.log_softmax(2), targets, steps, lengths, zero_infinity=True)
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert logits.grad.isfinite().all()


def test_one_element_of_many_in_a_list():
    params = [torch.ones(3), torch.zeros(3), torch.full((3,), math.inf)]
    finding = found(lambda: torch._foreach_reciprocal(params)[1].sum().item())
    assert finding.op == "aten::_foreach_reciprocal.default"
    assert finding.output.inf == 3


def test_an_op_that_refuses_what_it_is_given():
    finding = found(lambda: torch.linalg.eigvals(1 / torch.zeros(2, 2)))
    assert finding.op == "aten::reciprocal.default"
    assert finding.reached.startswith("an error of aten::linalg_eig")


def test_an_overflow_beside_a_mask_is_no_mask():
    finding = found(lambda: torch.tensor([70000.0, 1.0, -math.inf]).half().softmax(-1))
    assert finding.op == "aten::_to_copy.default"
    assert "70000 exceeds 65504" in finding.advice


def test_an_op_that_writes_what_it_reads():
    def program():
        total = torch.zeros(2, 2)
        torch.addmm(total, *2 * [torch.full((2, 2), 1e30)], out=total)
        total.sum().item()

    assert found(program).op == "aten::addmm.out"


@pytest.mark.parametrize(
    ("op", "given", "scalars", "made", "verdict"),
    [
        ("scalar_tensor.default", [], [-math.inf], -math.inf, "on purpose"),
        # a constant of one sign does not explain the other sign, and an op that moves elements makes no
        # infinity
        ("scalar_tensor.default", [], [-math.inf], math.inf, "made"),
        ("where.self", [1.0, -math.inf], [], math.inf, "made"),
        ("sub.Tensor", [math.inf, math.inf], [], math.nan, "became nan"),
        ("sub.Tensor", [math.nan, 1.0], [], math.nan, "passed on"),
    ],
)
def test_verdicts(op, given, scalars, made, verdict):
    traits = traits_of(attrgetter(op)(torch.ops.aten))
    arguments = [Argument("other", None, torch.tensor(value)) for value in given]
    assert judge(Argument("", None, torch.tensor(made)), arguments, traits, scalars)[0] == verdict


def test_a_large_negative_activation_in_fp16_is_no_mask():
    x = torch.tensor([[-60_000.0, 30_000.0, 30_000.0, 30_000.0]], requires_grad=True)

    def program():
        with autocast("cpu", dtype=torch.float16):
            centred = x.half() - x.half().mean(-1, keepdim=True)
            (centred @ torch.zeros(4, 2, dtype=torch.float16)).sum().item()

    finding = found(program)
    assert finding.op == "aten::sub.Tensor"
    assert finding.reached.startswith("nan in aten::mm.default")


def test_a_scaled_gradient_that_overflows_downwards_is_no_mask():
    x = torch.tensor([[-1.0, 1.0]], requires_grad=True)
    weight = torch.zeros(2, 2, dtype=torch.float16)

    def program():
        y = (x.half() @ weight + 1.0) * 3.0
        (-30_000.0 * y.float().sum()).backward()

    finding = found(program, strict=True)
    assert (finding.op, finding.forward_op) == ("aten::mul.Tensor", "aten::mul.Tensor")
    assert finding.held == ("-inf",)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_is_the_same_and_raises_no_alarm(dtype, fused):
    def train():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
        for _ in range(3):
            scaler.scale(loss_of(model, dtype=dtype)).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return list(model.parameters())

    torch.compiler.reset()  # code compiled earlier used other flags
    expected = train()
    with diagnose() as diagnosis:
        got = train()
    assert diagnosis.report().splitlines()[0] == "no harmful nan or inf was found"
    assert all(a.equal(b) for a, b in zip(expected, got, strict=True))


def test_keep_going_lists_each_origin_once():
    with diagnose(keep_going=True) as diagnosis:
        for _ in range(2):
            torch.zeros(2).log().mean().item()
        ((torch.zeros(2) / 0.0) + 1).sum().item()
    assert [finding.op for finding in diagnosis.findings] == ["aten::log.default", "aten::div.Tensor"]
    assert diagnosis.findings[0].count == 2
    assert diagnosis.report().count("\n\n") == 1


def test_two_gradients_of_one_op_are_one_finding():
    x = torch.tensor([3.0, 4.0], dtype=torch.float16, requires_grad=True)
    with diagnose(keep_going=True) as diagnosis:
        (x / (x - x)).tanh().float().sum().backward()
    (finding,) = diagnosis.findings
    assert (finding.direction, finding.forward_op) == ("backward", "aten::div.Tensor")
    assert "nan" in finding.held


def test_the_gradients_that_autograd_grad_returns_are_judged_by_what_is_left():
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)

    def gradients():
        return torch.autograd.grad((x * 3.0).float().sum() * 60_000.0, x)

    kept = []
    assert found(lambda: kept.append(gradients())).reached.startswith("gradients that are not finite")
    kept.clear()
    assert found(lambda: torch.nan_to_num(gradients()[0], posinf=0.0).sum().item()) is None


def test_the_moment_is_told_in_passes_and_steps():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose(keep_going=True) as diagnosis:
        for batch in range(7):
            loss = model(torch.ones(1, 2)).sum()
            if batch == 5:
                loss = loss + torch.zeros(1).log().sum()
            loss.backward()
            if batch % 3 == 2:
                optimizer.step()
        torch.zeros(1, requires_grad=True).sqrt().sum().backward()
    forward, backward = diagnosis.findings
    assert "\n  when    forward pass 6, backward pass 5, optimizer step 2\n" in str(forward)
    assert backward.when == "forward pass 7, backward pass 8, optimizer step 3"


def test_what_comes_after_the_last_step_belongs_to_no_further_one():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model)
    with Region(tracker):
        for step in range(1, 4):
            loss = model(torch.ones(1, 2)).sum()
            assert tracker.now().endswith(f", optimizer step {step}")
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                assert tracker.now().endswith(f", after optimizer step {step}")


def test_what_is_found_at_the_end_belongs_to_no_further_step():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, nn.Parameter(torch.ones(2))], lr=0.0)
    with diagnose(keep_going=True) as diagnosis:
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
    assert {finding.when for finding in diagnosis.findings} <= {"backward pass 3, after optimizer step 3"}


def test_a_pass_that_a_checkpoint_runs_again_is_not_counted_twice():
    log, x = nn.Hardtanh(), torch.zeros(1, requires_grad=True)
    with diagnose(keep_going=True) as diagnosis:
        for _ in range(3):
            checkpoint(log, x + 1, use_reentrant=False).sum().backward()
        log(x).sqrt().sum().backward()
    assert diagnosis.findings[0].when == "forward pass 4, backward pass 4, optimizer step 1"


def test_counting_leaves_steps_in_one_pass():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", init_scale=16.0)
    with diagnose():
        for _ in range(2):  # the first step creates the state
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.last_step(optimizer).one_pass


def test_names_are_those_of_the_model_that_is_given():
    model = nn.Sequential(nn.Linear(4, 4), Net(scale=1e6))
    torch.manual_seed(0)

    def program():
        with autocast("cpu", dtype=torch.float16):
            model[1](torch.randn(2, 5, 16))

    assert found(program).module == "Net.attention"
    with pytest.raises(NonFiniteError) as error, diagnose(model):
        program()
    assert error.value.finding.module == "1.attention"


def test_a_finding_is_data():
    finding = found(lambda: torch.zeros(1).log().item())
    assert json.loads(json.dumps(finding.to_dict()))["output"]["inf"] == 1
    error = pickle.loads(pickle.dumps(NonFiniteError(finding)))
    assert str(error.finding) == str(finding)
    assert isinstance(error, FloatingPointError)


def test_another_thread_is_not_watched():
    results = []
    thread = threading.Thread(target=lambda: results.append(torch.zeros(1).log().item()))
    with diagnose():
        thread.start()
        thread.join()
    assert results == [-math.inf]


def test_the_text_has_everything():
    text = str(found(lambda: torch.full((2, 2), 300.0, dtype=torch.float16).square().sum().item()))
    assert re.search(r"^aten::pow\.Tensor_Scalar made inf in forward, in fp16\n", text)
    for row in (
        rf"line +\S*{HERE}:\d+ in <lambda>: text = str",
        r"inputs +self fp16\[2x2\] 300 to 300",
        r"exponent=2",
        r"output +fp16\[2x2\] no finite element, 4 inf, first at \[0, 0\]",
        r"then +a number that Python has read",
        r"do +the result of pow exceeds 65504, .* give aten::pow the rule fp32",
    ):
        assert re.search(row, text), text


def test_an_infinity_that_vanishes_in_wrong_numbers():
    """A quotient by infinity is 0, in which no later op can see the infinity. In fp64 it is 1 / 300."""
    x = torch.full((2,), 300.0, dtype=torch.float16)
    finding = found(lambda: x / (x * x))
    assert (finding.op, finding.cause) == ("aten::mul.Tensor", "range")
    assert finding.reached.startswith("a finite result that differs much from fp64, in aten::div.Tensor")


def test_an_infinity_that_vanishes_in_the_right_numbers_is_none():
    x = torch.tensor([-20.0, 1.0], dtype=torch.float16)
    assert found(lambda: 1 / (1 + torch.exp(-x))) is None
    y = torch.full((2,), 300.0, dtype=torch.float16)
    assert found(lambda: (y * y).clamp(max=1e4) + 1) is None
    assert found(lambda: torch.where(y > 200, y, y * y)) is None


def test_what_cannot_run_in_a_wider_dtype_is_named(monkeypatch):
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    monkeypatch.setattr(Call, "changed", lambda *_: (("no", "arguments"), {}))
    with diagnose() as diagnosis:
        (x.float() * 1e-9).sum().backward()
    assert "they do not run in a wider dtype: aten::" in diagnosis.report()


def test_a_buffer_that_arithmetic_has_spoilt():
    norm = nn.BatchNorm1d(2)
    x = torch.randn(4, 2)

    def program():
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
        norm((x - x).log())

    finding = found(program)
    assert finding.op == "aten::log.default"
    assert finding.reached.endswith("the buffer BatchNorm1d.running_mean, at the end of the region")


def test_memory_that_is_written_before_it_is_read():
    def program():
        buffer = torch.empty(8)
        buffer.numpy()[:] = math.nan  # as uninitialized memory may contain
        buffer[:4], buffer[4:] = 1.0, 2.0
        torch.empty_like(buffer).copy_(buffer).sum().item()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2)).sum().item()

    assert found(program) is None


@pytest.mark.parametrize("error", [None, KeyError])
def test_nothing_stays_behind_and_an_error_of_the_program_comes_through(error):
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    model = Net()
    with contextlib.suppress(KeyError), diagnose(model, keep_going=error is None):
        loss_of(model).backward()
        if error is not None:
            kept = torch.zeros(2).log()  # not a finding, because the program ends for another reason
            raise error
    assert error is None or kept.isinf().all()
    assert _len_torch_dispatch_stack() == 0
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_infinities_in_the_data_do_not_take_the_place_of_what_stopped_the_program():
    batch = torch.from_numpy(np.array([[-math.inf, 1.0], [1.0, math.inf]], dtype=np.float32))

    def program():
        kept.append(batch * 2)
        torch.zeros(2, requires_grad=True).sqrt().sum().backward()

    kept = []
    assert found(program).forward_op == "aten::sqrt.default"
