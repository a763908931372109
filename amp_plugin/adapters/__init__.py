"""Thin layers that connect amp_plugin to training frameworks."""
