"""The autocast core: which dtype does each op run in."""
