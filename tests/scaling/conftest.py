"""Fixtures of the scaling tests: tiny models with known gradients."""

import contextlib

import pytest
import torch

from amp_plugin.scaling.step_log import StepResult
from tests.scaling.runs import SCALES


class Weights:
    """Parameters with one optimizer. The gradient of ``loss(g)`` is exactly ``g`` for each element."""

    def __init__(self, count: int = 3, optimizer: type = torch.optim.SGD, **options: object) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(count)]
        options.setdefault("lr", 1.0)
        self.optimizer = optimizer(self.params, **options)

    def loss(self, gradient: float = 1.0) -> torch.Tensor:
        return sum((p * gradient).sum() for p in self.params)

    def backward(self, scaler, gradient: float = 1.0) -> None:
        """Set new gradients and run the scaled backward pass."""
        self.optimizer.zero_grad()
        scaler.scale(self.loss(gradient)).backward()

    def train(self, scaler, *gradients: float) -> None:
        """Take a whole step for each gradient."""
        for gradient in gradients:
            self.backward(scaler, gradient)
            scaler.step(self.optimizer)
            scaler.update()

    @property
    def value(self) -> float:
        """Return the weight. For SGD with lr=1, it is minus the sum of the gradients of all steps."""
        values = {p.detach()[i].item() for p in self.params for i in range(4)}
        assert len(values) == 1, values
        return values.pop()

    @property
    def grad(self) -> float:
        values = {p.grad[i].item() for p in self.params for i in range(4)}
        assert len(values) == 1, values
        return values.pop()


@pytest.fixture(params=SCALES)
def scale(request):
    return request.param


@pytest.fixture(params=[False, True])
def fused(request):
    return request.param


@pytest.fixture
def weights():
    return Weights


@pytest.fixture
def training():
    """Run a small regression whose losses are compared bit for bit."""

    def run(scaler, dtype=torch.float16, steps=50, clip=None, spikes=True, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        losses = []
        for i in range(steps):
            x = torch.randn(32, 8) * (100.0 if spikes and i % 7 == 0 else 1.0)
            with torch.autocast("cpu", dtype):
                loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
        return losses, [p.detach().clone() for p in model.parameters()]

    return run


@pytest.fixture
def forbid_host_syncs():
    """Return a context in which reading a tensor's value fails. On the CPU, this stands for a host sync."""

    @contextlib.contextmanager
    def forbid():
        def refuse(*_):
            raise AssertionError("a host sync")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepResult, "known_at_once", staticmethod(lambda flag: None))  # as on a GPU
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patch.setattr(torch.Tensor, name, refuse)
            yield

    return forbid
