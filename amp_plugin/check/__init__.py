"""Reads Python source for mistakes with mixed precision, without running it."""
