"""A CUDA build of torch without cuda-core: everything trains with plain torch, after one warning."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ONE_LINE = (
    "RuntimeWarning: amp_plugin's CUDA kernels are not available on cuda:0, so plain torch is used: "
    "import of cuda.core halted; None in sys.modules; install or update cuda-core (pip install --upgrade "
)

PROGRAM = """
import sys
from functools import partial
import torch
from tests.host_device import host_device
host_device.install_if_loaded(kernels=False)
sys.modules["cuda.core"] = None

from torch import nn
import amp_plugin
from amp_plugin.kernels.cuda.register import cuda_core

OVERFLOWS = [3, 4, 9]


def train(make_optimizer, autocast, scaler_class):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1)).cuda()
    optimizer, scaler = make_optimizer(model.parameters(), lr=1e-2), scaler_class("cuda", init_scale=2.0**10)
    scales = []
    for step in range(12):
        batch = torch.randn(16, 8)
        if step in OVERFLOWS:
            batch[0, 0] = float("inf")
        with autocast("cuda", dtype=torch.float16):
            loss = model(batch.cuda()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), scales


for optimizer in (partial(torch.optim.AdamW, fused=True), torch.optim.SGD):
    ours, scales = train(optimizer, amp_plugin.autocast, amp_plugin.GradScaler)
    theirs, wanted = train(optimizer, torch.autocast, torch.amp.GradScaler)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert scales == wanted
    assert [step for step in range(1, 12) if scales[step] < scales[step - 1]] == OVERFLOWS
assert not cuda_core().loaded
"""


def test_everything_trains_after_one_warning():
    """It runs in a new interpreter: a fork would inherit locks of the frameworks' threads, but not the
    threads.
    """
    command, root = [sys.executable, "-c", PROGRAM], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count(ONE_LINE) == done.stderr.count("plain torch is used") == 1
