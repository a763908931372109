"""Python imports this file when it starts. So every process has the device in host memory.

pytest and its workers load the plugin instead, because they rewrite the test modules that they import.
"""

import os
import sys

if not any("pytest" in word or "exec(eval(" in word for word in sys.orig_argv):
    sys.path.insert(0, os.environ["HOST_DEVICE_ROOT"])

    from tests.host_device import host_device

    host_device.install_if_loaded()
    sys.path.remove(os.environ["HOST_DEVICE_ROOT"])
