"""All ranks compute with the same native code. If they do not, a warning says so."""

from types import SimpleNamespace

import pytest
import torch

from amp_plugin.scaling import ranks as collectives
from amp_plugin.scaling.gradients import Measurement, ShardLayout
from amp_plugin.scaling.ranks import Ranks
from tests.scaling.ops_seen import OpsSeen

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("others", "kernels", "refused"),
    [
        ((1.0, 0.0), 0, None),
        ((0.0, 0.0), 0, "native core and others do not"),
        ((1.0, 1.0), 0, "CUDA kernels and others do not"),
        ((1.0, 77.0), 78, r"CUDA kernels and others do not, or have others \(for another GPU"),
    ],
    ids=["alike", "without the native core", "with CUDA kernels", "with other CUDA kernels"],
)
def test_ranks_with_other_code_are_refused(monkeypatch, others, kernels, refused):
    """This rank has the native core, and possibly CUDA kernels. The other rank has the given code."""

    def all_reduce(tensor, op, group):
        other = torch.tensor(others)
        if tensor.shape == (2, 2):
            tensor.copy_(torch.maximum(tensor, torch.stack([other, -other])))

    on_any_device = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, device=None: on_any_device(values))
    monkeypatch.setattr(collectives, "native_core", lambda: SimpleNamespace(loaded=True))
    monkeypatch.setattr(collectives, "cuda_core", lambda _: SimpleNamespace(loaded=True, identity=kernels))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks, device = Ranks(agree=(None,)), torch.device("cuda", 0) if kernels else CPU
    if refused is None:
        assert ranks.combine([measurement(1.0)], 2.0, device, ())[0].item() == 1.0
    else:
        with pytest.raises(RuntimeError, match=f"some ranks have amp_plugin's {refused}"):
            ranks.combine([measurement(1.0)], 2.0, device, ())


@pytest.fixture
def collectives_seen(monkeypatch):
    """Return the group and the number of elements of each collective. Nothing is sent."""
    seen = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, op, group: seen.append((group, tensor.numel()))
    )
    return seen


def measurement(norm, layout=None, found=0.0):
    flags = torch.zeros(1, dtype=torch.uint8)
    return Measurement(torch.tensor(norm), torch.tensor(found), flags, None, layout)


def launches_of(call):
    """Return the call's result, and the ops that are one launch each on a GPU."""
    with OpsSeen() as seen:
        result = call()
    return result, [name for name in seen.names if name not in {"select", "empty"}]


ONE_PLACE = ["pack_measurements_", "unpack_measurements"]


@pytest.mark.parametrize("kind", ["agree", "sharded"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_small_op_stands_on_either_side_of_the_collective(collectives_seen, kind, count):
    measured = [measurement(3.0) for _ in range(count)]
    ranks = Ranks(**{kind: ("a",)})
    ranks.combine(measured, 2.0, CPU, ())  # first the ranks compare their cores
    collectives_seen.clear()
    (norm, found), launches = launches_of(lambda: ranks.combine(measured, 2.0, CPU, ()))
    assert (norm.item(), found.item()) == (pytest.approx(3.0 * count**0.5), 0.0)
    assert launches == ONE_PLACE
    assert collectives_seen == [("a", 2 if kind == "sharded" else 1)]


class Mesh:
    """The part of a DeviceMesh that the code uses."""

    def __init__(self, *sizes):
        self._sizes, self.ndim = sizes, len(sizes)

    def size(self, dim):
        return self._sizes[dim]

    def get_group(self, dim):
        return self, dim


def test_layouts_of_one_mesh_share_its_collectives(collectives_seen):
    """With FSDP2 over tensor parallelism, some weights are split along both dimensions, some along one."""
    mesh = Mesh(2, 4)
    both, one = ShardLayout(mesh, (True, True)), ShardLayout(mesh, (True, False))
    measured = [measurement(3.0, both), measurement(8.0, one)]
    (norm, found), launches = launches_of(lambda: Ranks().combine(measured, 2.0, CPU, (both, one)))
    assert norm.item() == 5.0  # the second is replicated on four ranks, and nothing is really added here
    assert launches == ONE_PLACE
    assert collectives_seen == [((mesh, 0), 3), ((mesh, 1), 3)]
    assert found.item() == 0.0


def test_an_overflow_goes_through_the_collectives_of_every_mesh(monkeypatch):
    meshes = Mesh(2), Mesh(3)
    layouts = [ShardLayout(mesh, (True,)) for mesh in meshes]

    def all_reduce(tensor, op, group):
        if tensor.shape == (2, 2):
            return  # the exchange about the native core
        if group == (meshes[0], 0):
            tensor[-1] += 1.0  # another rank has seen an overflow
        else:
            sent.append(tensor.reshape(-1)[-1].item())

    sent = []
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks = Ranks(agree=("a",))
    measured = [measurement(3.0, layouts[0]), measurement(4.0, layouts[1])]
    (norm, found), launches = launches_of(lambda: ranks.combine(measured, 2.0, CPU, layouts))
    assert (norm.item(), found.item()) == (5.0, 1.0)
    assert sent == [1.0, 1.0]
    # the remaining collectives are those of this test
    ours = [name for name in launches if name in ONE_PLACE]
    assert ours == ["pack_measurements_"] * 3 + ["unpack_measurements"]
