"""For ``pytest -p``: run tests marked ``gpu`` on a device in host memory, if it can be built.

It starts pytest again with the device's shared object loaded before torch.
"""

import os
import sys

from tests.host_device import host_device


def pytest_report_header() -> str:
    return f"CUDA device made of host memory: {host_device.cannot() or 'cuda:0 and cuda:1'}"


if not host_device.LOADED and not host_device.cannot():
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], host_device.environment())
host_device.install_if_loaded()
