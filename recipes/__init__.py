"""Runnable training programs. Each program in this folder shows how to use one feature of amp_plugin."""
