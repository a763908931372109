"""Runnable training programs. Each one shows a single feature of amp_plugin."""
