"""Tests of numerics: assertions about a training program, and the pytest plugin."""
