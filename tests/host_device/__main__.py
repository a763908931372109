"""Run a module, and every Python process that it starts, on the CUDA device in host memory.

    python -m tests.host_device tests.on_gpu first-ten-minutes --results FOLDER

Times measured there have no meaning. Benchmark sections use their smallest sizes, and steps have more time.
"""

import os
import sys

from tests.host_device import host_device

if missing := host_device.cannot():
    sys.exit(f"the device made of host memory is not to be had here: {missing}")
root = host_device.HERE.parents[1]
paths = [str(host_device.HERE / "at_start"), *filter(None, [os.environ.get("PYTHONPATH")])]
environment = {
    **host_device.environment(),
    "PYTHONPATH": os.pathsep.join(paths),
    "HOST_DEVICE_ROOT": str(root),
    "PYTEST_ADDOPTS": f"-p tests.host_device.plugin {os.environ.get('PYTEST_ADDOPTS', '')}",
}
os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], environment)
