"""Runnable training programs. Each program shows a single feature of amp_plugin."""
