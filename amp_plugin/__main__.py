"""Makes ``python -m amp_plugin`` run the command ``amp-plugin``, even from a source folder."""

from amp_plugin.cli import app

if __name__ == "__main__":
    app(prog_name="amp-plugin")
