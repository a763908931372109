"""Finds mixed-precision mistakes in Python source code, without running the code."""
