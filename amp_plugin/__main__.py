"""``python -m amp_plugin`` runs the command ``amp-plugin``, even if the package is not installed."""

from amp_plugin.cli import app

if __name__ == "__main__":
    app(prog_name="amp-plugin")
