"""Run an unedited script, or a module, with every Accelerator on amp_plugin.

python -m amp_plugin.adapters.accelerate script.py [arguments of the script]
python -m amp_plugin.adapters.accelerate -m package.module [arguments]
accelerate launch --config_file FILE -m amp_plugin.adapters.accelerate script.py [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from amp_plugin.adapters.accelerate import install


def main(arguments: list[str]) -> None:
    """Install, then run what the arguments name as the main program.

    Args:
        arguments: script or ``-m module``, and its own arguments.

    Raises:
        SystemExit: no script was named, or it does not exist.
    """
    is_module = arguments[:1] == ["-m"]
    target = arguments[1:] if is_module else arguments
    if target[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not target:
        sys.exit(str(__doc__))
    if not is_module and not Path(target[0]).is_file():
        sys.exit(f"{target[0]} is no file; give the path of a script, or -m and the name of a module")
    install()
    sys.argv = target
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
