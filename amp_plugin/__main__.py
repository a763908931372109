"""``python -m amp_plugin``: the command ``amp-plugin``, also where the package is not installed."""

from amp_plugin.cli import app

if __name__ == "__main__":
    app(prog_name="amp-plugin")
