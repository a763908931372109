"""Python imports this at its start, so every process has the device in host memory.

pytest and its workers load the plugin instead, since they rewrite what they import of the tests.
"""

import os
import sys

if not any("pytest" in word or "exec(eval(" in word for word in sys.orig_argv):
    sys.path.insert(0, os.environ["HOST_DEVICE_ROOT"])

    from tests.host_device import host_device

    host_device.install_if_loaded()
    sys.path.remove(os.environ["HOST_DEVICE_ROOT"])
