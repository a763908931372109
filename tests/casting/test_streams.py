"""A region over several streams: no stream reads a cast that another has yet to write."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import amp_plugin
from tests.host_device import host_device

pytestmark = [pytest.mark.gpu, pytest.mark.native]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def late():
    """Work that is as late as can be, on the device made of host memory; a real one is late by itself."""
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        yield


@pytest.fixture
def weight():
    made = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).cuda())
    torch.cuda.synchronize()
    return made


INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def expected(weight):
    return nn.functional.linear(INPUTS.to(BF16), weight.detach().cpu().to(BF16))


def test_within_a_region_a_stream_makes_its_own_casts(weight):
    inputs, other = INPUTS.cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with amp_plugin.autocast("cuda", dtype=BF16):
        torch.cuda._sleep(50_000_000)
        nn.functional.linear(inputs, weight)
        with torch.cuda.stream(other):
            second = nn.functional.linear(inputs, weight)
    other.synchronize()
    assert torch.equal(second.cpu(), expected(weight))
