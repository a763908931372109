"""Micro-batches on several streams: kept casts are written before they are read, and read before they are freed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import amp_plugin
from amp_plugin.casting.cast_cache import CastCache
from tests.host_device import host_device

pytestmark = [pytest.mark.gpu, pytest.mark.native]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def late():
    """Work that is as late as can be, on the device made of host memory; a real one is late by itself."""
    with host_device.late_work() if host_device.LOADED else contextlib.nullcontext():
        yield


def forward(weight, inputs, cache=None):
    with amp_plugin.autocast("cuda", dtype=BF16, cache=cache):
        return nn.functional.linear(inputs, weight)


@pytest.fixture
def weight():
    made = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).cuda())
    torch.cuda.synchronize()
    return made


INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def expected(weight):
    return nn.functional.linear(INPUTS.to(BF16), weight.detach().cpu().to(BF16))


def test_a_cast_is_finished_before_another_stream_reads_it(weight):
    cache, inputs, other = CastCache(), INPUTS.cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    forward(weight, inputs, cache)
    with torch.cuda.stream(other):
        second = forward(weight, inputs, cache)
    other.synchronize()
    assert torch.equal(second.cpu(), expected(weight))
    assert cache.casts == 1


def test_a_buffer_is_read_before_it_is_cast_anew(weight):
    cache, inputs, other = CastCache(), INPUTS.cuda(), torch.cuda.Stream()
    before = expected(weight)
    torch.cuda.synchronize()
    with torch.no_grad():
        forward(weight, inputs, cache)
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            second = forward(weight, inputs, cache)
        weight.zero_()
        first = forward(weight, inputs, cache)
    assert first.count_nonzero().item() == 0
    other.synchronize()
    assert torch.equal(second.cpu(), before)
    assert cache.casts == 2


def test_a_buffer_is_read_before_its_memory_is_given_away(weight):
    cache, inputs, other = CastCache(), INPUTS.cuda(), torch.cuda.Stream()
    before = expected(weight)
    torch.cuda.synchronize()
    with torch.no_grad():
        forward(weight, inputs, cache)
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            second = forward(weight, inputs, cache)
        cache.clear()
        others = [torch.full((16, 8), float("nan"), dtype=BF16, device="cuda") for _ in range(8)]
        torch.cuda.current_stream().synchronize()
    other.synchronize()
    assert torch.equal(second.cpu(), before)
    del others


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
