"""Compiled code, its reference in plain torch, and how it is built."""
