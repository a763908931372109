"""A build of torch with CUDA where cuda-core is missing: everything trains on plain torch, after one warning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
OVERFLOWS = [3, 4, 9]
ONE_LINE = (
    "RuntimeWarning: amp_plugin's CUDA kernels are not available on cuda:0, plain torch takes over: "
    "import of cuda.core halted; None in sys.modules; install or update cuda-core (pip install --upgrade "
)

PROGRAM = """
import json, sys
import torch
from tests.host_device import host_device
host_device.install_if_loaded(kernels=False)

from torch import nn
import amp_plugin
from amp_plugin.kernels.cuda.register import cuda_core

STEPS, OVERFLOWS = 12, (3, 4, 9)


def batches():
    torch.manual_seed(1)
    made = [torch.randn(16, 8) for _ in range(STEPS)]
    for step in OVERFLOWS:
        made[step][0, 0] = float("inf")
    return made


def make(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1)).cuda()
    return model, optimizer(model.parameters(), lr=1e-2)


def fused(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def plain(optimizer):
    model, steps = make(optimizer)
    scaler, skipped = amp_plugin.GradScaler("cuda", init_scale=2.0**10), []
    scaler.register(steps, names=model)
    for batch in batches():
        with amp_plugin.autocast("cuda", dtype=torch.float16):
            loss = model(batch.cuda()).square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(steps, 0.5)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
        skipped.append(scaler.last_step(steps).skipped)
    return weights(model), skipped


def stock(optimizer):
    model, steps = make(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for batch in batches():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch.cuda()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(steps)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


with_cuda_core = sys.argv[2] == "with"
host_device.install_if_loaded(kernels=with_cuda_core)
if not with_cuda_core:
    sys.modules["cuda.core"] = None
by_adam, skipped = plain(fused)
by_sgd, _ = plain(torch.optim.SGD)
result = dict(
    loaded=cuda_core().loaded, adam=by_adam, sgd=by_sgd, skipped=skipped, stock_adam=stock(fused),
    stock_sgd=stock(torch.optim.SGD),
)
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
"""


@pytest.fixture
def run(tmp_path):
    def on_the_device(*, with_cuda_core):
        """In a process of its own: a copy of one that has the frameworks has their threads' locks, and no threads."""
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path / "result", "with" if with_cuda_core else "without"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((tmp_path / "result").read_text()), done.stderr

    return on_the_device


def test_everything_trains_after_one_warning(run):
    without, said = run(with_cuda_core=False)
    assert not without["loaded"]
    assert said.count(ONE_LINE) == said.count("plain torch takes over") == 1
    assert [step for step, skipped in enumerate(without["skipped"]) if skipped] == OVERFLOWS
    for ours, theirs in (("adam", "stock_adam"), ("sgd", "stock_sgd")):
        assert without[ours] == pytest.approx(without[theirs], rel=1e-5, abs=1e-7)

    kernels, said = run(with_cuda_core=True)
    assert kernels["loaded"]
    assert "plain torch takes over" not in said
    for key in ("adam", "sgd"):
        assert kernels[key] == pytest.approx(without[key], rel=1e-5, abs=1e-7), key
    assert kernels["skipped"] == without["skipped"]
