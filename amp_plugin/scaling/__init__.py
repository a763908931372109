"""The scaling core: keep gradients representable, step safely."""
