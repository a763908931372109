"""Thin layers between amp_plugin and training frameworks."""
