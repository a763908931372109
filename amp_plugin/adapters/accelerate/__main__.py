"""The name that ``amp-plugin run`` had for programs of Accelerate; it does the same.

python -m amp_plugin.adapters.accelerate script.py [arguments of the script]
python -m amp_plugin.adapters.accelerate -m package.module [arguments]
accelerate launch --config_file FILE -m amp_plugin.adapters.accelerate script.py [arguments]
"""

from __future__ import annotations

import runpy
import sys


def main(arguments: list[str]) -> None:
    """Run ``python -m amp_plugin run`` with these arguments.

    Args:
        arguments: script or ``-m module``, and its own arguments.

    Raises:
        SystemExit: always, with the exit code of the program; 2 if there is no such script.
    """
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    sys.argv = ["amp-plugin", "run", *arguments]
    runpy.run_module("amp_plugin", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
