"""Invariant 3: clipping always works on unscaled gradients, and returns the norm of unscaled gradients."""

import math

import pytest
import torch

from amp_plugin import GradScaler
from tests.scaling.runs import scaler_of

NORM_TYPES = [2.0, 2, 1.0, math.inf, "inf", -math.inf, 3.0, 0.5, -1.0, 0]


class Model:
    """Parameters with random gradients, and copies of the gradients in float64."""

    def __init__(self, optimizer=torch.optim.SGD, *, scale=2.0**16, one_pass=True, **options):
        torch.manual_seed(0)
        shapes = [(5, 7), (1000,), (), (0,), (33, 65)]
        self.params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
        grads = [torch.randn(s) for s in shapes]
        self.optimizer = optimizer(self.params, lr=1.0, **options)
        self.scaler = scaler_of(scale, one_pass=one_pass)
        self.scaler.register(self.optimizer)
        self.scaler.scale(sum((p * g).sum() for p, g in zip(self.params, grads, strict=True))).backward()
        self.grads = [g.double() for g in grads]

    def norm(self, norm_type=2.0):
        return torch.linalg.vector_norm(torch.cat([g.flatten() for g in self.grads]), float(norm_type)).item()

    def clipped(self, max_norm, norm_type=2.0):
        return [g * min(1.0, max_norm / (self.norm(norm_type) + 1e-6)) for g in self.grads]

    def real(self):
        return [p.grad for p in self.params]

    def moved(self):
        """Return how far a step with a learning rate of 1 has moved the weights."""
        self.scaler.step(self.optimizer)
        return [-p.detach() for p in self.params]


def assert_close(ours, right, rtol=1e-6):
    torch.testing.assert_close([x.double() for x in ours], right, rtol=rtol, atol=0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
@pytest.mark.parametrize("target", ["optimizer", "params", "generator"])
def test_equal_to_float64(norm_type, max_norm, target, scale):
    model = Model(scale=scale)
    what = {"optimizer": model.optimizer, "params": model.params, "generator": iter(model.params)}[target]
    norm = model.scaler.clip_grad_norm_(what, max_norm, norm_type)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(model.norm(norm_type), rel=1e-6)
    assert_close(model.real(), model.clipped(max_norm, norm_type))


def test_any_number_of_times_and_mixed(fused, scale):
    model = Model(scale=scale, fused=fused)
    ours = model.scaler.clip_grad_norm_
    norms = [ours(model.optimizer, 10.0), ours(model.params, 5.0)]
    norms += [torch.nn.utils.clip_grad_norm_(model.params, 2.0), ours(model.optimizer, 1.0)]
    assert [norm.item() for norm in norms] == pytest.approx([model.norm(), 10.0, 5.0, 2.0], rel=1e-5)
    assert_close(model.moved(), model.clipped(1.0), rtol=1e-5)


def test_by_value(fused, scale):
    model = Model(scale=scale, fused=fused)
    for target in (model.optimizer, model.params, iter(model.params)):
        model.scaler.clip_grad_value_(target, 0.5)
    right = [g.clamp(-0.5, 0.5) for g in model.grads]
    assert_close(model.real(), right)
    assert_close(model.moved(), right)


@pytest.mark.parametrize("how", ["norm", "value", "torch"])
def test_overflow_survives_clipping(fused, how):
    """Clipping by value makes infinities finite, but the step is skipped nevertheless."""
    model = Model(fused=fused)
    model.params[0].grad[0, 0] = math.inf
    if how == "value":
        model.scaler.clip_grad_value_(model.optimizer, 1.0)
        assert model.params[0].grad.isfinite().all()
    elif how == "torch":
        model.scaler.unscale_(model.optimizer)
        torch.nn.utils.clip_grad_norm_(model.params, 1.0)
    else:
        assert model.scaler.clip_grad_norm_(model.optimizer, 1.0).item() == math.inf
    assert not any(moved.any() for moved in model.moved())
    assert model.scaler.last_step(model.optimizer).skipped


def test_error_if_nonfinite(scale):
    model = Model(scale=scale)
    model.params[1].grad[3] = math.nan
    with pytest.raises(RuntimeError, match="norm of order 2.0 .*non-finite.*the step is skipped"):
        model.scaler.clip_grad_norm_(model.optimizer, 1.0, error_if_nonfinite=True)


def test_parameters_of_an_unknown_optimizer_are_refused():
    model, other = Model(), torch.nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="1 of the parameters belong to no optimizer .*register"):
        model.scaler.clip_grad_norm_([*model.params, other], 1.0)


FIRST = "got {}; the optimizer or its parameters come first"
WRONG_CALLS = [
    (lambda clip, module, sgd: clip.clip_grad_norm_(1.0, sgd), TypeError, "max_norm .*" + FIRST.format("SGD")),
    (lambda clip, module, sgd: clip.clip_grad_norm_(sgd, None), TypeError, FIRST.format("NoneType")),
    (lambda clip, module, sgd: clip.clip_grad_norm_(sgd, 1.0, "fro"), TypeError, "norm_type .* number, got str"),
    (lambda clip, module, sgd: clip.clip_grad_norm_(sgd, -1.0), ValueError, "max_norm=-1.0 .* not negative"),
    (lambda clip, module, sgd: clip.clip_grad_value_(sgd, math.nan), ValueError, "clip_value=nan is not allowed"),
    (lambda clip, module, sgd: clip.clip_grad_norm_(module, 1.0), TypeError, r"got Linear; give model.parameters"),
    (lambda clip, module, sgd: clip.clip_grad_norm_(module.named_parameters(), 1.0), TypeError, "got tuple; give"),
    (lambda clip, module, sgd: clip.clip_grad_norm_(1.0, 1.0), TypeError, "parameters are wanted, got float"),
]  # fmt: skip


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("call", "error", "message"), WRONG_CALLS)
def test_wrong_arguments_are_named(call, error, message, enabled):
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", enabled=enabled)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    with pytest.raises(error, match=message):
        call(scaler, model, optimizer)


def test_sparse_gradients(scale):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer, scaler = torch.optim.SGD(embedding.parameters(), lr=1.0), scaler_of(scale)
    start = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([1, 1, 2])).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(4 * 4 + 4), rel=1e-6), "duplicates are added up first"
    scaler.step(optimizer)
    moved = start - embedding.weight.detach()
    assert torch.allclose(moved[1], torch.full((4,), 2 / math.sqrt(20)))
    assert not moved[3].any()


def test_complex_parameters(scale):
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), scaler_of(scale)
    scaler.scale((param * (3.0 - 4.0j)).real.sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1e9).item() == pytest.approx(5 * math.sqrt(3), rel=1e-6)
    scaler.step(optimizer)
    assert torch.equal(param.detach(), torch.full((3,), -(3 + 4j)))
