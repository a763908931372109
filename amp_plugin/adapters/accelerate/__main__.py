"""``python -m amp_plugin.adapters.accelerate train.py``: the older name of ``amp-plugin run train.py``."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv = ["amp-plugin", "run", *sys.argv[1:]]
    runpy.run_module("amp_plugin", run_name="__main__", alter_sys=True)
