"""Helps to test numerics, with assertions about a training program and a pytest plugin."""
