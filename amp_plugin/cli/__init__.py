"""The command `amp-plugin`."""

from amp_plugin.cli.app import app as app
