"""Restores what recipes change in their process."""

import pytest
import torch

from tests.adapters.accelerate_pair import reset


@pytest.fixture(autouse=True)
def fresh_state():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    reset()
