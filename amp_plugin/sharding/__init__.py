"""Dtypes of a sharded model: a plan states them once, and reports show what torch really uses."""
