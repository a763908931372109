"""Weights that FSDP2 refills are never kept: a forward after an update uses the new ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.process_groups import leave
from tests.warm_processes import call_on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.native]


def second_forward() -> None:
    from torch.distributed.fsdp import fully_shard

    import amp_plugin

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain = [p.detach().clone() for p in model.parameters()]
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    x = torch.randn(2, 8)

    def expected():
        hidden = x.bfloat16() @ plain[0].bfloat16().t()
        return hidden @ plain[1].bfloat16().t()

    with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
        first = model(x)
        assert torch.equal(first, expected())
        assert torch.ops.amp_plugin._kept_cast_count() == 0
        first.float().sum().backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain, strict=True):
                # by a kernel that no hook of an optimizer announces
                p.to_local().numpy()[:] *= 2
                q.mul_(2)
        for layer in model:
            layer.reshard()
        assert torch.equal(model(x), expected())
    leave()


def test_second_forward_uses_the_new_weights():
    ranks = call_on_ranks(2, 90, second_forward)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
