"""shadow_run measures each op's error against float64, and shows where it occurs."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_plugin import OpRules, autocast, shadow_run


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        query = self.query(x) * 3
        weights = (query @ query.transpose(-1, -2)).softmax(-1)
        return self.out(weights @ x)


def step(model, rules, dtype=torch.float16):
    torch.manual_seed(0)
    with autocast("cpu", dtype=dtype, rules=rules):
        loss = functional.cross_entropy(model(torch.randn(4, 16, 32)).mean(1), torch.arange(4))
    (loss * 1024).backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def rules(softmax):
    return OpRules.default("cpu").with_rule("aten::softmax", softmax)


@pytest.mark.native
def test_it_points_at_a_softmax_that_is_forced_to_fp16():
    torch.manual_seed(0)
    model = Attention()
    with shadow_run() as run:
        step(model, rules("lower_precision"))
    (module, op, direction), errors = next(iter(run.errors().items()))
    assert (module, op, direction) == ("Attention", "aten::_softmax.default", "forward")
    assert errors.own_in_eps > 10
    assert errors.underflowed > 0
    with shadow_run() as run:
        step(model, rules("fp32"))
    assert not any("_softmax.default" in op for _, op, _ in run.errors())  # it returns fp32
    assert run.not_compared() == {}


def test_the_program_is_not_changed():
    torch.manual_seed(0)
    model = Attention()
    expected = step(model, None)
    model.zero_grad()
    with shadow_run(dtype=torch.float64):
        got = step(model, None)
    assert all(a.equal(b) for a, b in zip(expected, got, strict=True))


def test_an_ops_own_error_is_against_the_same_inputs():
    torch.manual_seed(0)
    x = torch.randn(64, 64).bfloat16()
    with shadow_run(dtype=torch.float64) as run:
        y = x.exp()
    exact = x.double().exp()
    ((_, errors),) = run.errors().items()
    assert errors.own == pytest.approx(float(((y.double() - exact).abs() / exact).mean()), rel=1e-9)
    assert errors.arriving == pytest.approx(float((y.double() - exact).norm() / exact.norm()), rel=1e-9)
    assert 0.1 < errors.own_in_eps < 0.3
    assert errors.elements == 64 * 64


def test_what_arrives_is_against_a_run_without_rounding():
    def program(x, narrow):
        half = x.to(narrow, copy=True)
        half.mul_(3)
        view = half.view(-1)[:512].view(16, 32)
        product = view.exp().tanh() @ half.t()
        product.sum().backward()
        return product.detach().double(), x.grad.double()

    torch.manual_seed(0)
    x = (0.3 * torch.randn(32, 32)).requires_grad_()
    with shadow_run(dtype=torch.float64) as run:
        product, gradient = program(x, torch.float16)
    exact, exact_gradient = program(x.detach().double().requires_grad_(), torch.float64)
    errors = {(op, direction): found for (_, op, direction), found in run.errors().items()}
    forward = errors["aten::mm.default", "forward"]
    assert forward.arriving == pytest.approx(float((product - exact).norm() / exact.norm()), rel=1e-6)
    assert forward.arriving > forward.own
    with torch.no_grad():
        assert torch.allclose(run.without_rounding(x.grad), exact_gradient)
    assert not torch.allclose(gradient, exact_gradient)
    assert run.not_compared() == {}


def test_underflow_and_headroom():
    x = torch.tensor([1.0, 2.0, 4.0, 2.0**-30, 2.0**-20, 0.0])
    with shadow_run() as run:
        x.half()
    ((_, errors),) = run.errors().items()
    assert (errors.underflowed, errors.elements) == (1, 6)
    assert errors.headroom == pytest.approx(14.0, abs=0.01)
    assert errors.own == pytest.approx(1 / 6)


def test_an_overflow_is_an_infinite_error():
    with shadow_run() as run:
        torch.tensor([70000.0, 1.0]).half()
    (row,) = json.loads(json.dumps(run.to_dict()))["rows"]
    assert row["arriving"] == "inf"


def test_dropout_keeps_its_mask():
    torch.manual_seed(0)
    with shadow_run() as run, autocast("cpu", dtype=torch.bfloat16):
        y = functional.dropout(torch.randn(64, 64).bfloat16(), 0.5)
        y @ y
    assert max(found.arriving for found in run.errors().values()) < 0.05


def train_three_steps(options, dtype):
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    x = torch.randn(64, 32)
    for _ in range(3):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_run_without_rounding_goes_on_through_steps(options, wide):
    expected = train_three_steps(options, torch.float32)
    with shadow_run(dtype=wide) as run:
        weight = train_three_steps(options, torch.bfloat16)
        got = weight.bfloat16()
    errors = run.errors()[("", "aten::_to_copy.default", "forward")]
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    assert errors.arriving == pytest.approx(error, rel=2e-3)
    assert errors.arriving > 5 * float((got.double() - weight.double()).norm() / weight.double().norm())
    assert run.not_compared() == {}


def test_what_cannot_be_run_again_is_counted():
    with shadow_run() as run:
        half = torch.randn(64).half()
        noisy = torch.bernoulli(half.abs().clamp(max=1.0))
        noisy.normal_()
        torch.empty_like(half).fill_(2.0)
    assert run.not_compared() == {"aten::bernoulli.default": 1}
    assert (
        run.table().caption
        == "not measured, so their results count as exact: aten::bernoulli.default (1 call)"
    )


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"dtype=torch.float16\): give torch.float32, or torch.float64"):
        shadow_run(dtype=torch.float16)


def test_the_table():
    with shadow_run() as run:
        assert "was the code in an autocast block?" in str(run.table().caption)
        step(Attention(), None)
    assert run.table(rows=3).row_count == 3
    assert "more rows with smaller errors" in str(run.table(rows=3).caption)


def test_shards_are_measured_and_collectives_are_counted():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    from tests.process_groups import group_of_one

    torch.manual_seed(0)
    left, right = torch.randn(32, 32).half(), torch.randn(32, 32).half()
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        rows, whole = distribute_tensor(left, mesh, [Shard(0)]), distribute_tensor(right, mesh, [Replicate()])
        with shadow_run() as run:
            product = (rows @ whole).to_local() * 2
            total = product.clone()
            torch.distributed.all_reduce(total)
    errors = {op: found for (_, op, _), found in run.errors().items()}
    exact = left.double() @ right.double()
    error = float(((product / 2).double() - exact).norm() / exact.norm())
    assert errors["aten::mm.default"].arriving == pytest.approx(error, rel=1e-3)
    assert run.not_compared() == {"c10d::allreduce_.default": 1}


def test_a_jump_to_infinity_is_an_overflow_and_not_a_lack_of_digits():
    x = torch.linspace(100.0, 300.0, 64).half()
    with shadow_run() as run:
        ((x + 0.1) * 1.1) * 300
    sentence = run.told_jump()[0]
    assert "to inf at aten::mul.Tensor" in sentence
    assert sentence.endswith("its result is not finite in 16 bits; compute it in fp32")
