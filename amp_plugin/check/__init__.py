"""Finds mistakes with mixed precision in Python source code, without running the code."""
