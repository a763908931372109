"""The CUDA benchmark stays runnable where it cannot run: its sizes, and what it says without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.cuda_gradients import SETS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda.py"


@pytest.mark.parametrize(
    ("name", "count", "numel"),
    [("ResNet-50", 161, 25_557_032), ("GPT-2 124M", 148, 124_439_808), ("1 x 1 GB", 1, 2**28)],
)
def test_the_sets_have_the_sizes_of_the_models(name, count, numel):
    shapes = SETS[name]()
    assert len(shapes) == count
    assert sum(math.prod(shape) for shape in shapes) == numel


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_without_a_gpu_the_script_says_why_it_stops(tmp_path):
    """As a script too, where its own folder would hide the package cuda behind benchmarks/cuda.py."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ,
    )
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("the CUDA kernels cannot run here: ")
