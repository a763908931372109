"""Each section that is measured on a GPU runs there, at the smallest sizes."""

import math

import pytest
import torch

from amp_plugin.casting.installed_kernels import KERNELS
from benchmarks import clocks, cuda
from benchmarks.__main__ import run
from benchmarks.catalogue import NEEDS, keys, section
from benchmarks.setting import Setting
from tests.host_device import host_device

pytestmark = [pytest.mark.gpu, pytest.mark.native]

ONLY_ON_A_DEVICE = {
    "launches": "a profiler of launches",
    "diagnosis": "tensors that take the storage of others",
    "lightning": "the time for it",
    "accelerate": "the time for it",
}


@pytest.mark.filterwarnings("ignore:.*")  # as in test_sections.py
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.whole_run] * (key in {"compiled", "training"}))
        for key in keys("cuda")
        if key not in {"host", "first_use"}
    ],
)
def test_each_section_runs_on_a_gpu(key, monkeypatch):
    if host_device.LOADED and key in ONLY_ON_A_DEVICE:
        pytest.skip(f"the device made of host memory has not {ONLY_ON_A_DEVICE[key]}")
    for package in NEEDS.get(key, ()):
        pytest.importorskip(package)
    monkeypatch.setattr(clocks, "FLUSH_BYTES", 4096)
    KERNELS.install()
    for outcome in run(section(key), Setting(device="cuda", tiny=True)).outcomes:
        assert all(math.isfinite(spread.median) and spread.median >= 0 for spread in outcome.times.values())


def test_the_kernels_are_checked_before_they_are_timed():
    cuda.check([torch.randn(shape, device="cuda") for shape in ((5, 3), (70,), ())])
