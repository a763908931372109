"""Each test starts in a process that no adapter has changed."""

from collections.abc import Iterator

import pytest

from amp_plugin.adapters.accelerate import uninstall
from tests.adapters.accelerate_pair import reset


@pytest.fixture(params=["fp16", "bf16"])
def precision(request):
    return request.param


@pytest.fixture(params=[False, True])
def fused(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Restore Accelerate's process-wide state, our default rules, and everything that tests have installed."""
    reset()
    yield
    uninstall()
    reset()
