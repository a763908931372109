"""A step is captured in a CUDA graph. Replays and eager steps in any order equal the eager run.

The graph is imitated on the CPU. With a GPU, a real one is used too.
"""

import itertools

import pytest
import torch

from amp_plugin import GradScaler
from amp_plugin.scaling import loss_scale, step_log
from tests.scaling.device_waits import waits_are_errors
from tests.scaling.replayed_graph import ReplayedGraph

CAPTURED_AT = 2
OVERFLOWS = (4, 5, 9)


class Loop:
    """A loop that clips, and the values that can be read from its scaler after each step."""

    def __init__(self, optimizer, clip, device="cpu", **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3).to(device)
        flags = {"capturable": True} if optimizer is torch.optim.AdamW and device == "cuda" else {}
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, fused=True, **flags)
        self.scaler = GradScaler(device, init_scale=2.0**8, growth_interval=3, **options)
        self.inputs, self.clip = torch.zeros(5, 4, device=device), clip

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().sum()
        self.scaler.scale(loss).backward()
        if self.clip == "in place":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        return loss

    def step(self, *, in_closure=False):
        if self.clip == "in the step":
            closure = self.backward if in_closure else None
            if not in_closure:
                self.backward()
            self.scaler.clip_and_step(self.optimizer, 1.0, closure=closure)
        elif in_closure:
            self.scaler.step(self.optimizer, self.backward)
        else:
            self.backward()
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
            "overflow": last.overflow_report().summary(),
            "weights": [p.detach().cpu() for p in self.model.parameters()],
        }

    def run(self, batches):
        """Step on each batch, and return all values that were read."""
        answers = []
        for batch in batches:
            self.inputs.copy_(batch)
            self.step()
            answers.append(self.answers())
        return answers


def batches():
    made = list(torch.randn(14, 5, 4, generator=torch.Generator().manual_seed(0)))
    for i in OVERFLOWS:
        made[i][0, 0] = float("inf")
    return made


def replay_and_step(loop, graph, eager):
    """Continue after a capture. Return the values that can be read after each step."""
    answers = {}
    for i, batch in enumerate(batches()[CAPTURED_AT:], CAPTURED_AT):
        loop.inputs.copy_(batch)
        loop.step() if i in eager else graph.replay()
        answers[i] = loop.answers()
        if eager and i not in eager:  # the result belongs to the last eager step
            answers[i] = {key: answers[i][key] for key in ("scale", "counts", "weights")}
    return answers


def check(got, want):
    for i, answers in got.items():
        torch.testing.assert_close(answers.pop("weights"), want[i]["weights"])
        assert answers == {key: want[i][key] for key in answers}, i


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("clip", [None, "in the step", "in place"])
@pytest.mark.parametrize("eager", [(), (3, 7, 8, 12)], ids=["replays", "replays and eager steps"])
def test_a_captured_step_is_the_step(monkeypatch, optimizer, clip, eager, device):
    want = Loop(optimizer, clip, device).run(batches())
    assert [answers["skipped"] for answers in want] == [i in OVERFLOWS for i in range(len(want))]
    loop = Loop(optimizer, clip, device)
    if device == "cpu":
        graph = capture = ReplayedGraph()
        for module in (loss_scale, step_log):
            monkeypatch.setattr(module, "capturing", graph.capturing)
        loop.run(batches()[:CAPTURED_AT])
    else:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        capture = torch.cuda.graph(graph)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loop.run(batches()[:CAPTURED_AT])
        torch.cuda.current_stream().wait_stream(side)
    before = loop.counts()
    with capture:
        loop.step()
    assert loop.counts() == before  # a capture does not run the ops
    check(replay_and_step(loop, graph, eager), want)


def torch_refuses_to_fuse(optimizer):
    """Return the reason why torch itself has no fused step on a GPU, or an empty string.

    Torch 2.11 has none for Adagrad.
    """
    param = torch.nn.Parameter(torch.ones(1, device="cuda"))
    param.grad = torch.ones_like(param)
    try:
        optimizer([param], fused=True).step()
    except RuntimeError as error:
        return f"torch {torch.__version__} has no fused {optimizer.__name__} on this device: {error}"
    return ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "in_closure"),
    [*itertools.product([torch.optim.SGD, torch.optim.AdamW], [True, False]), (torch.optim.Adagrad, False)],
)
@pytest.mark.parametrize("clip", [None, "in the step", "in place"])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_step_waits_for_the_device(optimizer, clip, enabled, in_closure):
    if refused := torch_refuses_to_fuse(optimizer):
        pytest.skip(refused)
    loop = Loop(optimizer, clip, "cuda", enabled=enabled)
    loop.run(batches()[:1])
    data = torch.stack(batches()).cuda()
    torch.cuda.synchronize()
    with waits_are_errors():
        for batch in data:
            loop.inputs.copy_(batch)
            loop.step(in_closure=in_closure)
    assert loop.counts() == (len(OVERFLOWS),) * 2
    right = Loop(optimizer, clip, enabled=enabled).run([batches()[0], *batches()])[-1]
    for name in ("scale", "weights"):
        torch.testing.assert_close(loop.answers()[name], right[name])
