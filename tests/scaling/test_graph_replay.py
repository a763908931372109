"""A step captured in a CUDA graph, emulated: replays and eager steps in any order are the eager run."""

from __future__ import annotations

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import loss_scale, step_result
from tests.scaling.replayed_graph import ReplayedGraph

CAPTURED_AT = 2
OVERFLOWS = (4, 5, 9)


class Loop:
    """A loop that clips, and what can be asked of its scaler after each step."""

    def __init__(self, optimizer, clip):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, fused=True)
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.inputs, self.clip = torch.zeros(5, 4), clip

    def step(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.inputs).square().sum()).backward()
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, 1.0, fold=self.clip == "folded")
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def counts(self):
        return self.scaler.skipped_steps(), self.scaler.skipped_steps(self.optimizer)

    def answers(self):
        last = self.scaler.last_step(self.optimizer)
        return {
            "scale": self.scaler.get_scale(),
            "counts": self.counts(),
            "skipped": last.skipped,
            "scales": (last.scale_before, last.scale_after),
            "overflow": str(last.overflow_report()),
            "weights": [p.detach().flatten().tolist() for p in self.model.parameters()],
        }


def batches():
    made = list(torch.randn(14, 5, 4, generator=torch.Generator().manual_seed(0)))
    for i in OVERFLOWS:
        made[i][0, 0] = float("inf")
    return made


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("clip", [None, "folded", "in place"])
@pytest.mark.parametrize("eager", [(), (3, 7, 8, 12)], ids=["replays", "replays and eager steps"])
def test_a_captured_step_is_the_step(monkeypatch, optimizer, clip, eager):
    data, plain = batches(), Loop(optimizer, clip)
    want = []
    for batch in data:
        plain.inputs.copy_(batch)
        plain.step()
        want.append(plain.answers())
    assert [answers["skipped"] for answers in want] == [i in OVERFLOWS for i in range(len(data))]

    loop, graph = Loop(optimizer, clip), ReplayedGraph()
    for module in (loss_scale, step_result):
        monkeypatch.setattr(module, "capturing", graph.capturing)
    for batch in data[:CAPTURED_AT]:
        loop.inputs.copy_(batch)
        loop.step()
    before = loop.counts()
    with graph:
        loop.step()
    assert loop.counts() == before  # a capture runs nothing
    for i, batch in enumerate(data[CAPTURED_AT:], CAPTURED_AT):
        loop.inputs.copy_(batch)
        loop.step() if i in eager else graph.replay()
        got = loop.answers()
        if eager and i not in eager:  # the result asked for is the last eager step's
            got = {key: got[key] for key in ("scale", "counts", "weights")}
        assert got == {key: want[i][key] for key in got}, i
