"""Numerics as a test: what a test of a training program asserts, and the plugin of pytest."""
