"""Each test begins and ends with torch's own kernels under ``torch.autocast``, and leaves autocast as it was."""

from collections.abc import Iterator

import pytest
import torch

from amp_plugin.casting.installed_kernels import NO_RULES
from amp_plugin.casting.rules import TABLES
from amp_plugin.casting.rules_in_force import clear, number_on


def give_back() -> None:
    """Restore torch's autocast kernels: an Accelerator that was never ended leaves ours in place."""
    if any(number_on(device) != NO_RULES for device in TABLES):
        clear()


def autocast_state() -> tuple[object, ...]:
    devices = ("cpu", "cuda", "ipu", "maia", "mtia")
    nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    on = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return on, torch.is_autocast_cache_enabled(), nesting


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    give_back()
    before = autocast_state()
    yield
    give_back()
    assert autocast_state() == before


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
