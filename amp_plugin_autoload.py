"""Define the function that ``import torch`` calls through the entry point group ``torch.backends``.

The module ``amp_plugin_autoload`` is not part of the package amp_plugin, and imports the package only if one
of two environment variables is set. A broken installation of amp_plugin therefore cannot make ``import
torch`` fail.
"""

import os


def bind() -> None:
    """Apply the environment variables ``AMP_PLUGIN_RULES`` and ``AMP_PLUGIN_TAKEOVER``.

    If the amp_plugin installation is broken, this function only prints an error message. If a variable has an
    invalid value, OptionError is raised, so that the user can correct the value.
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
    import contextlib  # noqa: PLC0415 - rarely needed
    import sys  # noqa: PLC0415

    with contextlib.suppress(Exception):  # standard error may be closed
        print(f"amp_plugin: {text}", file=sys.stderr)
