"""What ``import torch`` calls in every program, by the entry point ``torch.backends``.

It is a module of its own, next to the package, and imports nothing unless one of two variables is set. So
nothing that is wrong with the package can stop ``import torch``.
"""

import os


def bind() -> None:
    """Do what ``AMP_PLUGIN_RULES`` and ``AMP_PLUGIN_TAKEOVER`` say; print a line if amp_plugin is broken.

    An OptionError says that the value of a variable is wrong: whoever has set it has asked for it.
    """
    given = [name for name in ("AMP_PLUGIN_RULES", "AMP_PLUGIN_TAKEOVER") if os.environ.get(name)]
    if not given:
        return
    try:
        from amp_plugin.adapters.takeover import bind_environment  # noqa: PLC0415 - may be broken

        bind_environment()
    except Exception as error:
        if "OptionError" in {kind.__name__ for kind in type(error).__mro__}:
            raise
        _say(f"{' and '.join(given)} cannot be followed, {type(error).__name__}: {error}; install it again")


def _say(text: str) -> None:
    import contextlib  # noqa: PLC0415 - seldom needed
    import sys  # noqa: PLC0415

    with contextlib.suppress(Exception):  # standard error may be closed
        print(f"amp_plugin: {text}", file=sys.stderr)
