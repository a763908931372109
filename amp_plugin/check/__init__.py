"""Finds mistakes with mixed precision in Python source, without running it."""
