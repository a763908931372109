"""Stores weights in 16 bits, and lets any optimizer update them as exactly as float32 weights."""
