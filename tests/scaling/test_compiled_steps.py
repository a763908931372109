"""Steps, clips and scaled losses in compiled code give the same results as in eager code."""

import itertools
import math

import pytest
import torch
from torch import nn

from amp_plugin import GradScaler
from tests.samples import sampled

POISONED = 3
WARNING_OF_TORCH = pytest.mark.filterwarnings(  # if the graph breaks at the loss
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    fresh_dynamo()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def linear_with(**options):
    """Return a layer, its optimizer and a scaler."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", **options)


def batches(*, poisoned: bool):
    for index in range(6):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        if poisoned and index == POISONED:
            batch[0, 0] = math.nan
        yield batch


class Training:
    """A model that one function trains.

    The function is compiled with a backend, or runs eagerly if it is None.
    """

    def __init__(self, backend, *, enabled, clip=False, **flags):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **flags)
        self.scaler = GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        self.clip = clip
        self.step = torch.compile(self.one_step, backend=backend) if backend else self.one_step

    def one_step(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(batch).float().square().mean()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, *, poisoned):
        """Train. Return the weights, and the results of each step."""
        told = []
        for batch in batches(poisoned=poisoned):
            self.step(batch)
            result = self.scaler.last_step(self.optimizer)
            told.append((result.skipped, result.scale_before, result.scale_after, result.one_pass))
        weights = [param.detach().clone() for param in self.model.parameters()]
        return weights, told, self.scaler.skipped_steps(), self.scaler.state_dict()


KINDS = [(False, {}, "aot_eager"), (True, {}, "eager"), (True, {"fused": True}, "eager")]
NAMES = ["plain", "clip", "fused"]
STEPS = list(itertools.product((False, True), (True, False), range(len(KINDS))))
# Each kind of step occurs with a scaler and without one, and with a healthy batch and a poisoned one.
SAMPLE = [at for at, (poisoned, enabled, kind) in enumerate(STEPS) if (poisoned + enabled + kind) % 2]


@pytest.mark.parametrize(
    ("poisoned", "enabled", "kind"),
    sampled(STEPS, SAMPLE),
    ids=[
        f"{'poisoned' if poisoned else 'healthy'}-{'scaled' if enabled else 'guard'}-{NAMES[kind]}"
        for poisoned, enabled, kind in STEPS
    ],
)
def test_a_compiled_training_step_is_the_eager_one(poisoned, enabled, kind):
    clip, flags, backend = KINDS[kind]
    eager = Training(None, enabled=enabled, clip=clip, **flags).run(poisoned=poisoned)
    compiled = Training(backend, enabled=enabled, clip=clip, **flags).run(poisoned=poisoned)
    assert all(map(torch.equal, compiled[0], eager[0]))
    assert all(weight.isfinite().all() for weight in compiled[0])
    assert compiled[1:] == eager[1:]
    assert compiled[2] == poisoned


@pytest.mark.parametrize("used_before", [True, False])
def test_scale_is_part_of_a_graph_that_is_compiled_once(used_before):
    model, optimizer, scaler = linear_with(init_scale=1024.0, growth_interval=1)
    if used_before:
        scaler.scale(torch.ones(()))
    scaled = torch.compile(
        lambda batch: scaler.scale(model(batch).square().mean()), backend="aot_eager", fullgraph=True
    )
    for batch in batches(poisoned=False):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        loss = scaled(batch)
        assert torch.equal(loss, model(batch).square().mean() * scale)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 2**6  # no graph contains the scale of an earlier step as a constant
    # One graph, after another one that creates the scale's tensor.
    assert graphs() == 2 - used_before


@WARNING_OF_TORCH
def test_a_loss_with_a_scale_of_its_own_is_unscaled_by_it():
    model, optimizer, scaler = linear_with(losses=["a"])
    scaler.scale(torch.ones(()), name="a")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
    batch = next(batches(poisoned=False))

    @torch.compile(backend="eager")
    def scaled():
        return scaler.scale(model(batch).square().mean(), name="a")

    scaled().backward()
    scaler.unscale_(optimizer)
    expected = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


@WARNING_OF_TORCH
def test_no_more_graphs_than_with_torchs_scaler():
    counts = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        fresh_dynamo()
        training = Training("eager", enabled=True)
        training.scaler = scaler
        for batch in batches(poisoned=False):
            training.step(batch)
        counts.append(graphs())
    assert counts[0] <= counts[1]


@WARNING_OF_TORCH
def test_a_loss_with_its_own_scale_keeps_it_in_compiled_code():
    """The graph itself can only multiply by the default scale."""
    model, optimizer, scaler = linear_with(init_scale=8.0, losses=["edges"], growth_interval=1)
    scaler.scale(model(torch.ones(1, 4)).sum(), name="edges").backward()
    scaler.step(optimizer)
    scaler.update()  # from now on the scale of the edges is 16
    scale = torch.compile(lambda loss: scaler.scale(loss, name="edges"), backend="eager")
    assert scale(torch.ones((), requires_grad=True)).item() == 16.0
    assert scaler.scale(torch.ones(())).item() == 8.0
