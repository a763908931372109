"""Stores weights in 16 bits and trains them exactly, with any optimizer."""
