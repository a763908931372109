"""The native ledger passes DTensor gradients to kernels without running Python code for each of them."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from amp_plugin.kernels.build import native_core
from amp_plugin.scaling import gradients
from amp_plugin.scaling.gradients import batch_gradients, batches_of

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def meshes():
    """Return two meshes of four ranks, and a third one that equals the first."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield (
            init_device_mesh("cpu", (4,)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")),
            init_device_mesh("cpu", (4,)),
        )
    finally:
        torch.distributed.destroy_process_group()


def param_with(grad):
    param = torch.nn.Parameter(torch.zeros_like(grad.detach()))
    param.grad = grad
    return param


def of_local(mesh, *placements, numel=6, dtype=torch.float32):
    local = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    return param_with(DTensor.from_local(local, mesh, placements))


def described(batches):
    return [(batch.device, batch.layout, list(batch.params)) for batch in batches]


def without_gradient():
    return torch.nn.Parameter(torch.zeros(3))


def many_kinds(meshes):
    line, square, other = meshes
    return [
        param_with(torch.full((4,), 2.0)),
        of_local(line, Shard(0)),
        without_gradient(),
        of_local(line, Replicate(), numel=5),
        of_local(line, Shard(0), numel=7, dtype=torch.float16),
        of_local(square, Shard(0), Replicate()),
        of_local(other, Shard(0), numel=9),
        param_with(torch.full((3,), 1.0, dtype=torch.float64)),
        of_local(square, Replicate(), Shard(0), numel=8),
    ]


def test_the_same_batches(meshes, monkeypatch):
    params = many_kinds(meshes)
    one_by_one = described(batch_gradients(params))
    monkeypatch.setattr(gradients, "local_gradient", lambda param: pytest.fail("looked at by Python"))
    assert described(batches_of(params)) == one_by_one
    assert len(one_by_one) == 5  # plain; sharded on an equal mesh; replicated; two layouts on the 2 x 2 mesh


@pytest.mark.parametrize("write", [False, True])
def test_the_same_numbers(meshes, write):
    ours, theirs = many_kinds(meshes), many_kinds(meshes)
    for params in (ours, theirs):
        params[4].grad._local_tensor[3] = torch.inf
    factor = torch.tensor(0.25)
    call = ("unscale_" if write else "norm_check", factor, 2.0, False)
    by_ledger = [batch.run(*call) for batch in batches_of(ours)]
    one_by_one = [batch.run(*call) for batch in batch_gradients(theirs)]
    for mine, right in zip(by_ledger, one_by_one, strict=True):
        assert [value.tolist() for value in mine] == [value.tolist() for value in right]
    for mine, right in zip(ours, theirs, strict=True):
        if right.grad is not None:
            assert torch.equal(*(getattr(grad, "_local_tensor", grad) for grad in (mine.grad, right.grad)))
    for batches, params in ((batches_of(ours), ours), (batch_gradients(theirs), theirs)):
        assert sum(batch.run("multiply_", torch.tensor(3.0), None, None).item() for batch in batches) == 1
        assert torch.equal(params[0].grad, torch.full((4,), 6.0 * (0.25 if write else 1.0)))


def test_partial_gradients_are_summed_up_first(meshes):
    params = [of_local(meshes[0], Shard(0)), of_local(meshes[0], Partial())]
    batches = batches_of(params)
    assert [list(batch.params) for batch in batches] == [params[:1], params[1:]]
    assert params[1].grad.placements == (Replicate(),)


def test_what_is_on_its_way_is_waited_for(meshes, monkeypatch):
    waited = []
    monkeypatch.setattr(AsyncCollectiveTensor, "wait", lambda self: waited.append(self) or self.elem)
    local = AsyncCollectiveTensor(torch.ones(6))
    param = param_with(DTensor.from_local(torch.ones(6), meshes[0], [Shard(0)]))
    param.grad._local_tensor = local
    (batch,) = batches_of([param])
    assert batch.run("norm_check", torch.tensor(1.0), 2.0, False)[0].item() == pytest.approx(6**0.5)
    assert len(waited) == 1


def test_another_wrapper_is_left_to_python(meshes):
    params = [of_local(meshes[0], Shard(0)), param_with(torch.ones(4).to_sparse())]
    assert native_core().extension.GradientLedger.survey_shards(params) is None
    assert [list(batch.params) for batch in batches_of(params)] == [params[:1], params[1:]]
