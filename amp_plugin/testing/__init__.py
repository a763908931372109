"""Provides assertions about the numerics of a training program, and a pytest plugin."""
