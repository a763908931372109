"""Weights stored in 16 bits and trained exactly, with any optimizer."""
